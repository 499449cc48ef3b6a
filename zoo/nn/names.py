"""Published names that several families share, as tables (see `checkpoint`)."""


def decoder_block(theirs: str, ours: str, has_qk_norm: bool) -> dict[str, str]:
    """A block of transformers' Llama and its kin, without biases; Qwen3 normalises queries and keys too.

    theirs, ours: its prefixes. Source: transformers, models/qwen3/modeling_qwen3.py, Qwen3DecoderLayer.
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
    """Queries, keys and values, of which a `FusedLinear` makes one matrix. kind: or their "bias"."""
    parts = enumerate("qkv")
    return {f"{theirs}.self_attn.{part}_proj.{kind}": f"{ours}.qkv.{kind}[{i}]" for i, part in parts}


def gate_up(theirs: str, ours: str) -> dict[str, str]:
    """The two matrices of a `SwiGLU` that read its input, as one."""
    parts = enumerate(("gate", "up"))
    return {f"{theirs}.mlp.{part}_proj.weight": f"{ours}.mlp.gate_up.weight[{i}]" for i, part in parts}
