"""One pass of a codec's decoder over streams whose states are separate rows."""

from torch import Tensor

from zoo.nn.conv import CodecState


def decode(decoder, codes: Tensor, rows: Tensor, start: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples of codes [B, F, K], and the states [B, V] after the first `count` [B] frames."""
    state = CodecState(decoder.layout, rows, codes.shape[1], count)
    return decoder(codes, start, state), state.next()
