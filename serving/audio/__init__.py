"""Audio between the engine and a listener: PCM, the formats, speed and playback.

All other parts of `serving` may import these modules, which import none of them.
"""
