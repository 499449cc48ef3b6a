"""Orpheus' vocabulary: which id says what, and how seven tokens make a frame.

    id 0 ... W - 1    text; the published tokenizer has W = 128,000 words
       W + 0 ... 255  special tokens of Llama 3
       W + 256 + N    <custom_token_N>, N to 28683: the prompt's structure (N < 10), then the codes

    place in the frame    0    1    2    3    4    5    6        id = W + 266 + 4096 place + code
    SNAC level            1    2    3    3    2    3    3
    latent columns        all  0-1  0    1    2-3  2    3        four latent columns a frame (46.9 Hz)

All ids below count from W: the id of the first code is 128,266 in the published vocabulary. Tiny demo
checkpoints have fewer words. Source: canopyai/Orpheus-TTS at 835ac7c, orpheus_tts/decoder.py and
engine_class.py, read as a specification.
"""

from __future__ import annotations

NUM_WORDS = 128_000  # as published
NUM_CUSTOM = 28_684
CUSTOM = 256  # <custom_token_0>
NUM_MARKED = CUSTOM + NUM_CUSTOM  # ids behind the words
VOCABULARY = NUM_WORDS + NUM_MARKED  # as published: 156,940
BEGIN_TEXT, END_OF_LLAMA, PAD, END_TEXT = 0, 1, 4, 9
BEGIN_SPEECH, END_SPEECH = 257, 258
BEGIN_HUMAN, END_HUMAN, BEGIN_AI, END_AI = 259, 260, 261, 262
FIRST_CODE = 266
CODES = 4096  # of each place
PLACES = 7  # of a frame
# The model ends a speech with the first one. The other two end a text of Llama 3, and nothing can follow
# them.
STOPS = (END_SPEECH, END_OF_LLAMA, END_TEXT)
# Latent column -> the places in the frame whose codes it is the sum of, one of each level.
COLUMNS = ((0, 1, 2), (0, 1, 3), (0, 4, 5), (0, 4, 6))


def code_id(place: int, code: int) -> int:
    """Return the id, counted from the first one behind the words, of a code at a place of the frame."""
    return FIRST_CODE + CODES * place + code
