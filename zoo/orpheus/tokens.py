"""Orpheus' vocabulary: which id says what, and how seven tokens make a frame.

    id 0 ... 128255   text and special tokens of Llama 3
       128256 + N     <custom_token_N>, N to 28683: the prompt's structure (N < 10), then the codes

    place in the frame    0    1    2    3    4    5    6        id = 128266 + 4096 place + code
    SNAC level            1    2    3    3    2    3    3
    latent columns        all  0-1  0    1    2-3  2    3        four latent columns a frame (46.9 Hz)

Source: canopyai/Orpheus-TTS at 835ac7c, orpheus_tts/decoder.py and engine_class.py, read as a specification.
"""

from __future__ import annotations

VOCABULARY = 156940
CUSTOM = 128256  # id of <custom_token_0>
NUM_CUSTOM = 28684
BEGIN_TEXT, PAD, END_TEXT = 128000, 128004, 128009
BEGIN_SPEECH, END_SPEECH = 128257, 128258
BEGIN_HUMAN, END_HUMAN, BEGIN_AI, END_AI = 128259, 128260, 128261, 128262
FIRST_CODE = 128266
CODES = 4096  # of each place
PLACES = 7  # of a frame
# The model ends a speech with the first one. The other two end a text of Llama 3, and nothing can follow them.
STOPS = (END_SPEECH, 128001, END_TEXT)
# Latent column -> the places in the frame whose codes it is the sum of, one of each level.
COLUMNS = ((0, 1, 2), (0, 1, 3), (0, 4, 5), (0, 4, 6))


def token_id(place: int, code: int) -> int:
    """Return the id of a code at a place of the frame."""
    return FIRST_CODE + CODES * place + code
