"""The ids of the vocabulary that all streams share: special tokens, clusters, codes and words.

Special tokens are looked up by name in the checkpoint's own `token_list`, because releases of ESPnet number the tasks
differently. A converted checkpoint names each of them in its config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zoo.checkpoint.config import VOCABULARY, ConfigBlock

YAML = "config.yaml"
BOOKS = 8  # codebooks of the codec
STREAMS = 1 + BOOKS  # the first one holds the clusters of a self-supervised encoder (SSL)
PAD = 0
# field -> its name in config.yaml, and its key in a converted config.json
NAMES = {
    "end": ("<sos/eos>", "eos_token_id"),
    "text": ("<text_bpe_start/end>", "text_bpe_start_end_token_id"),
    "voice": ("<spk_start/end>", "spk_start_end_token_id"),
    "audio": ("<codec_ssl_start/end>", "codec_ssl_start_end_token_id"),
    "plain": ("<codec_ssl_plain_tts_task>", "codec_ssl_plain_tts_task_token_id"),
    "cloned": ("<codec_ssl_tts_task>", "codec_ssl_tts_task_token_id"),
    "heard": ("<codec_ssl_asr_task>", "codec_ssl_asr_task_token_id"),
    "continued": ("<codec_ssl_audiolm_task>", "codec_ssl_audiolm_task_token_id"),
    "text_dialogue": ("<text_dialogue_task>", "text_dialogue_task_token_id"),
    "audio_dialogue": ("<audio_dialogue_task>", "audio_dialogue_task_token_id"),
    "system": ("<system_prompt>", "system_prompt_token_id"),
    "user": ("<user_input>", "user_input_token_id"),
    "assistant": ("<assistant_output>", "assistant_output_token_id"),
}


@dataclass(frozen=True)
class Vocabulary:
    size: int
    end: int  # also the begin
    text: int  # markers: what follows is text, a voice prompt, audio
    voice: int
    audio: int
    plain: int  # tasks: speech without a voice prompt, and behind one
    cloned: int
    heard: int  # the words of a clip
    continued: int  # audio without a text
    text_dialogue: int
    audio_dialogue: int
    system: int  # roles
    user: int
    assistant: int
    ssl: int  # the first cluster
    num_clusters: int
    codec: int  # the first code
    num_codes: int  # of one codebook
    first_word: int
    num_words: int
    words: tuple[str, ...] = ()  # if the checkpoint lists them

    @classmethod
    def read(cls, root: ConfigBlock) -> Vocabulary:
        """Read config.yaml. Raises ValueError."""
        tokens = root.get("token_list")
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise ValueError(f"{root.file}: token_list is not a list of strings")
        ids = {token: i for i, token in enumerate(tokens)}
        if tokens[:2] != ["<pad>", "<unk>"]:
            raise ValueError(f"{root.file}: token_list does not begin with <pad> and <unk>")
        if missing := [name for name, _ in NAMES.values() if name not in ids]:
            raise ValueError(f"{root.file}: token_list lacks {', '.join(missing)}")
        bias = root.block("token_bias")
        ranges = {name: _range(bias, name, len(tokens)) for name in ("ssl", "codec", "text_bpe")}
        special = {key: ids[name] for key, (name, _) in NAMES.items()}
        first, end = ranges["text_bpe"]
        blocks = _blocks(bias, "codec", ranges["ssl"], ranges["codec"], ranges["text_bpe"])
        return cls(len(tokens), **special, **blocks, words=tuple(tokens[first:end]))

    @classmethod
    def of_converted(cls, root: ConfigBlock) -> Vocabulary:
        """Read a converted checkpoint's config.json. Raises ValueError."""
        size = root.integer("vocab_size", *VOCABULARY)
        root.expect(pad_token_id=PAD, num_codec_streams=BOOKS)
        special: dict[str, Any] = {
            key: root.integer(theirs, 1, size - 1) for key, (_, theirs) in NAMES.items()
        }
        ranges = [_converted_range(root, name, size) for name in ("ssl", "codec", "text")]
        blocks = _blocks(root, "codec_token_start", *ranges)
        if root.get("codec_per_stream_size") != blocks["num_codes"]:
            raise root.refuse("codec_per_stream_size", f"{blocks['num_codes']} fits the range of codes")
        return cls(size, **special, **blocks)


def _blocks(
    root: ConfigBlock, key: str, ssl: tuple[int, int], codec: tuple[int, int], text: tuple[int, int]
) -> dict[str, Any]:
    """Return the fields of the ranges of ids, each a first id and the one behind its last. key: of the codes'
    range, for the error."""
    (ssl_first, ssl_end), (first, end), (first_word, last_word) = ssl, codec, text
    if first != ssl_end or (end - first) % BOOKS:
        raise root.refuse(key, f"the ids behind ssl, in {BOOKS} codebooks of equal size, are possible")
    return {
        "ssl": ssl_first,
        "num_clusters": ssl_end - ssl_first,
        "codec": first,
        "num_codes": (end - first) // BOOKS,
        "first_word": first_word,
        "num_words": last_word - first_word,
    }


def _range(bias: ConfigBlock, name: str, size: int) -> tuple[int, int]:
    """Return the first id of a modality and the id behind its last one."""
    first, end = bias.integers(name, 2, size, (2, 2))
    if end <= first:
        raise bias.refuse(name, "a first id and a larger end are possible")
    return first, end


def _converted_range(root: ConfigBlock, name: str, size: int) -> tuple[int, int]:
    first = root.integer(f"{name}_token_start", 2, size - 1)
    return first, root.integer(f"{name}_token_end", first + 1, size)
