"""What a family may ask for, as plain data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Eager:
    """Run the function as it is written."""


@dataclass(frozen=True)
class Whole:
    """One graph from the first line of the function to the last: `fullgraph=True`, no graph break, one
    callable for every batch size.

    Blocks that repeat are marked where they are written, by `torch.compiler.nested_compile_region`: the graph
    then holds each once and calls it many times, and compiling takes as long for eighty blocks as for one.
    """


@dataclass(frozen=True)
class Part:
    """A method that a function calls, by its place below the function's own object: "flow.advance".

    any_size: of its arguments those of which the graph holds for every size of an axis, with a name for each of their
    first axes; "" where there is one size. Equal names mean equal sizes: (("x", ("batch", "frames")), ...). A dot leads
    to a part of an argument: "seen.index".
    """

    place: str
    any_size: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Parts:
    """Run the function as it is written, but for these methods, each of which is one graph: for a function that would be
    too large a graph as a whole, because it calls them many times."""

    parts: tuple[Part, ...]


Lowering = Eager | Whole | Parts


@dataclass(frozen=True)
class Strategy:
    """How a family's verbs are lowered. `fp32` lists, for the reader, what the model's own lines keep in
    fp32."""

    step: Lowering = Whole()
    prefill: Lowering = Eager()  # of `hidden`, over many positions: once a request, and its shapes vary
    render: Lowering = Eager()
    # on a GPU, where every shape is recorded
    gpu_prefill: Lowering = Whole()
    gpu_render: Lowering = Whole()
    fp32: tuple[str, ...] = ()
    cuts_renders: bool = (
        False  # on a CPU `render` itself takes as many slots at a time as its caches are large enough for
    )
    # sizes of recorded launches; a smaller batch is padded up to one. Steps read weights, and eight rows of them take
    # less time than one or four (benchmarks/LOG.md); renders compute. None is of one row: that would be a graph more.
    batches: tuple[int, ...] = (8, 16, 32, 64)
    render_batches: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
