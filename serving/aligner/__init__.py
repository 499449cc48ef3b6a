"""The aligner's process, which finds when the words of spoken text were said, and its client.

    HTTP process ── PCM and text of finished pieces ──> aligner process ── word times ──> HTTP process

The process starts when words are first asked for. Neither the engine nor the streams wait for it.
"""
