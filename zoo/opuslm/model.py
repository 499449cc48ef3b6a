"""OpusLM as a family: embed, hidden, emit, render.

    slot ── embed ──> [B, D] ── hidden: 32 paged blocks ──> [B, D] ── emit ──> 9 ids, each to its own frame ── render ──> 16 kHz
             │ the last row, 9 ids of one table summed        │ 9 heads over their own ids, 9 draws          │ DAC, 20 ms a frame
                                                              └ and one over the words: a word, if the slot writes

The reference adds a vector per stream to the hidden state, and scores all ids of all modalities with one head
for each stream. Here a stream scores only the ids that it may draw, in one product for all streams, and the
vector's share of each score is a constant. The first stream draws a code or a word. Source: ESPnet's SpeechLM at
5f0a39a, core_lm/ar_parallel.py, ar_delay.py and net_utils.py.
"""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.check import check
from zoo.contract import NEVER, Batch, Family, Prompt, Said, Spec, View, frame_cap
from zoo.nn import llama
from zoo.nn.keys import prefix_key
from zoo.nn.linear import FusedLinear
from zoo.nn.narrow import dtype_of
from zoo.nn.sampling import draw, draw_inline, gumbel
from zoo.opuslm import body
from zoo.opuslm.codec import Decoder
from zoo.opuslm.config import HEAD_ROWS, Config
from zoo.opuslm.delay import DELAY, MIN_FRAMES, MIN_WORDS, OPENING, TEXT_ROWS, DelayState, Words
from zoo.opuslm.ids import BOOKS, PAD, STREAMS
from zoo.opuslm.listener import Encoders
from zoo.opuslm.prompt import MAX_FRAMES, MAX_WORDS, TEXT_TEMPERATURE, PromptWriter, Script
from zoo.opuslm.strategy import STRATEGY
from zoo.request import Request, RequestError
from zoo.text.pieces import most_s


class Backbone(nn.Module):
    """The LM: the table of all ids, the blocks, and for each stream the rows of the head that it draws from. First
    come its codes, then the end and the marker of audio (first stream) or the pad (others). At last come the words,
    the end and the marker of text, for the first stream where it writes."""

    offset: Tensor  # [all rows] float32, after prepare(): the share of the streams' vectors in the scores

    def __init__(self, config: Config):
        super().__init__()
        known, hidden = config.vocabulary, config.body.hidden
        self.ids = nn.Embedding(known.size, hidden)
        self.stack = (body.Stack if config.is_olmo else llama.Stack)(config.body)
        codes = (known.num_codes + 1,) * BOOKS
        self.heads = FusedLinear(hidden, (known.num_clusters + 2, *codes, known.num_words + 2))
        self.streams = nn.Embedding(HEAD_ROWS, hidden)

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute what follows from the weights. Call once, with the weights in place."""
        self.stack.prepare()
        heads = self.heads.weight.split(self.heads.parts)
        vectors = self.streams.weight[[*range(STREAMS), 0]].float()
        offset = torch.cat([head.float() @ vector for head, vector in zip(heads, vectors, strict=True)])
        self.register_buffer("offset", offset, persistent=False)

    def rows(self, ids: Tensor) -> Tensor:
        """Embed rows of ids [..., 9] as the sum of their vectors, [..., D]."""
        return self.ids(ids).sum(-2)

    def scores(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """h [B, D] -> the scores of each stream [B, 9, V], -inf behind the ids that it may draw, and those of words
        [B, W], both float32."""
        offsets = self.offset.split(self.heads.parts)
        *scores, words = [part.float() + more for part, more in zip(self.heads(h), offsets, strict=True)]
        width = max(self.heads.parts[:-1])
        padded = [F.pad(part, (0, width - part.shape[1]), value=-torch.inf) for part in scores]
        return torch.stack(padded, 1), words


class OpusLMState(DelayState):
    """Adds, for each slot: lstm [layers, 2, D], the codec's state near the next window; and the sampling
    values."""

    lstm: Tensor
    temperature: Tensor
    text_temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    def __init__(self, family: OpusLM, slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        self.add("lstm", *family.codec.state_shape, dtype=family.codec.stem.weight.dtype)
        self.add("temperature")
        self.add("text_temperature")
        self.add("top_k", dtype=torch.int64)
        self.add("top_p", default=1)


class OpusLM(Family[OpusLMState]):
    def __init__(
        self,
        config: Config,
        spec: Spec,
        backbone: Backbone,
        codec: Decoder,
        encoders: Encoders | None,
        writer: PromptWriter,
    ):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.backbone, self.codec, self.encoders, self.writer = backbone, codec, encoders, writer
        assert codec.context == spec.window.lookahead, (
            f"the codec looks {codec.context} frames ahead, not {spec.window.lookahead}"
        )
        self.dtype, self.device = dtype_of(backbone.ids), backbone.ids.weight.device
        known = config.vocabulary
        self.words = Words(known.end, known.assistant, known.audio)

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def prompt(self, request: Request, said: Said | None = None) -> Prompt:
        values = check(request, self.spec)
        script = self.writer(request, said)
        length, most = len(script.rows), values.pop("max_tokens")
        room = self.spec.max_positions - length
        writes, speaks = self._writes(request), request.output in ("speech", "continuation")
        behind = TEXT_ROWS + OPENING if speaks else 0
        # A spoken answer has many more frames than words, so its words take a quarter of the room at most.
        words = min(MAX_WORDS, most, room // 4 if speaks else room) if writes else 0
        if writes and (words < 1 or room <= words + (behind + DELAY) * speaks):
            takes = f"the prompt takes {length} positions of {self.spec.max_positions}"
            raise RequestError("text", f"{takes}, which leaves no room for an answer")
        max_frames = 1
        steps = words + behind if writes else 0
        if speaks:
            guard = self._guard(request, most)
            max_frames = frame_cap(self.spec, request, length, guard, extra_steps=DELAY + steps)
            steps += max_frames + DELAY
        if request.temperature is not None and TEXT_TEMPERATURE.name not in request.options:
            values[TEXT_TEMPERATURE.name] = request.temperature
        slot = values | {"seed": request.seed, "speaks": int(speaks)}
        if writes:
            slot |= {"begin": NEVER, "max_words": words}
        if script.before is not None:
            slot["before"] = script.before
        return Prompt(
            inputs=self.backbone.rows(script.rows.to(self.device)),
            prefix_keys=tuple(prefix_key(*row) for row in script.rows.tolist()),
            max_frames=max_frames,
            max_steps=steps,
            slot=slot,
            usage=self._usage(script),
            is_text=not speaks,
        )

    def later_prompt(self, request: Request, said: Said) -> Prompt:
        return self.prompt(request, said)

    def _writes(self, request: Request) -> bool:
        """Return whether the first steps write words."""
        return self.config.is_dialogue or request.output in ("text", "transcript")

    def _guard(self, request: Request, most: int) -> int:
        """Return the most frames of a request that names none."""
        if self.config.is_dialogue:
            return most
        if request.output == "continuation":
            return MAX_FRAMES
        return max(1, round(most_s(request.text) * self.spec.frame_rate_hz))

    def _usage(self, script: Script) -> dict[str, int]:
        counts = {"input_tokens": script.num_text + script.num_audio, "prompt_positions": len(script.rows)}
        return counts | ({"input_audio_tokens": script.num_audio} if script.num_audio else {})

    def detokenize(self, token: int) -> bytes:
        return self.writer.tokenize.bytes_of(token)

    # on the host, at admission

    def state(self, slots: int, max_frames: int | None = None) -> OpusLMState:
        return OpusLMState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    # on the device

    def embed(self, state: OpusLMState, slots: Tensor) -> Tensor:
        return self.backbone.rows(state.row[slots])

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        return self.backbone.stack(inputs, batch)

    def emit(self, state: OpusLMState, slots: Tensor, h: Tensor) -> None:
        """Draw nine ids per slot independently and write each to its own frame (20 ms), or draw a word. h [B, D]."""
        logits, words = self.scores(state, slots, h)  # [B, 9, V], [B, W]
        sampling = (state.temperature, state.top_k, state.top_p)
        settings = [repeat(value[slots], "b -> (b s)", s=STREAMS) for value in sampling]
        noise = gumbel(state.seed[slots], state.steps[slots], range(STREAMS), logits.shape[2])
        drawn = draw(logits.flatten(0, 1), *settings, noise.flatten(0, 1)).unflatten(0, (-1, STREAMS))
        sampling = (state.text_temperature, state.top_k, state.top_p)
        settings = [value[slots] for value in sampling]
        noise = gumbel(state.seed[slots], state.steps[slots], range(STREAMS, STREAMS + 1), words.shape[1])
        temperature, top_k, top_p = settings
        word = draw_inline(words, temperature, top_k, top_p, noise[:, 0])
        state.step(slots, *self._ids(drawn), self._word_id(word), self.words)

    def scores(self, state: OpusLMState, slots: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores [B, 9, V] and [B, W] for h [B, D], without the end in the first steps."""
        logits, words = self.backbone.scores(h)
        steps, known = state.steps[slots], self.config.vocabulary
        is_early = steps - state.begin[slots] < MIN_FRAMES
        logits[:, 0, known.num_clusters].masked_fill_(is_early, -torch.inf)
        words[:, known.num_words].masked_fill_(steps < MIN_WORDS, -torch.inf)
        return logits, words

    def _word_id(self, word: Tensor) -> Tensor:
        """Return the ids [B] of drawn words."""
        known = self.config.vocabulary
        other = torch.where(word == known.num_words, known.end, known.text)
        return torch.where(word < known.num_words, known.first_word + word, other)

    def _ids(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids and the codes [B, 9] of what was drawn. Any other token counts as code 0."""
        known = self.config.vocabulary
        cluster, code = drawn[:, :1], drawn[:, 1:]
        stop, book = cluster - known.num_clusters, torch.arange(BOOKS, device=drawn.device)
        cluster_id = torch.where(
            stop < 0, known.ssl + cluster, torch.where(stop == 0, known.end, known.audio)
        )
        code_id = torch.where(code < known.num_codes, known.codec + known.num_codes * book + code, PAD)
        codes = torch.where(stop < 0, cluster, 0), torch.where(code < known.num_codes, code, 0)
        return torch.cat((cluster_id, code_id), 1), torch.cat(codes, 1)

    def render(self, state: OpusLMState, view: View) -> tuple[Tensor, Tensor]:
        """Render a window. The codec also reads seven frames on each side of it from the tape, which ends with
        the last frame that is ready."""
        context, slots = self.codec.context, view.slots
        codes = state.window(view, context, context)[..., 1:]  # [B, F + 14, 8]
        samples, lstm = self.codec(codes, view.start, view.count, state.ready[slots], state.lstm[slots])
        state.lstm[slots] = lstm
        return samples.float(), view.count * self.spec.frame_samples
