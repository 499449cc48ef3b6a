"""Tables of published names that several families share (see `zoo.checkpoint.loading`)."""


def decoder_block(theirs: str, ours: str, has_qk_norm: bool) -> dict[str, str]:
    """Return the names of a decoder block of transformers (Llama and similar models), without biases. Qwen3
    also has norms of queries and keys.

    theirs, ours: the block's prefixes. Source: transformers, models/qwen3/modeling_qwen3.py,
    Qwen3DecoderLayer.
    """
    pairs = {
        "input_layernorm": "norm",
        "post_attention_layernorm": "mlp_norm",
        "self_attn.o_proj": "out",
        "mlp.down_proj": "mlp.down",
    }
    if has_qk_norm:
        pairs |= {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}
    names = {f"{theirs}.{a}.weight": f"{ours}.{b}.weight" for a, b in pairs.items()}
    return names | qkv(theirs, ours) | gate_up(theirs, ours)


def qkv(theirs: str, ours: str, kind: str = "weight") -> dict[str, str]:
    """Return the names of queries, keys and values, one matrix in a `FusedLinear`. kind: "weight" or
    "bias"."""
    parts = enumerate("qkv")
    return {f"{theirs}.self_attn.{part}_proj.{kind}": f"{ours}.qkv.{kind}[{i}]" for i, part in parts}


def gate_up(theirs: str, ours: str) -> dict[str, str]:
    """Return the names of gate and up, one matrix in a `SwiGLU`."""
    parts = enumerate(("gate", "up"))
    return {f"{theirs}.mlp.{part}_proj.weight": f"{ours}.mlp.gate_up.weight[{i}]" for i, part in parts}
