"""Long works: documents that the server speaks in the background, a part at a time, into files with chapter marks.

POST /v1/audio/works ─ works.py ─ process: the document becomes book.json ─ a directory (store.py)
maker.py             ─ parts through the engine as flexible requests ─ 0001-001.flac ...
                     ─ process: the parts of a chapter become 0001.m4a, and those of all chapters book.m4b
"""
