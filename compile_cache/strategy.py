"""The lowerings that a family can ask for, as plain data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Eager:
    """Run the function as it is written."""


@dataclass(frozen=True)
class Whole:
    """Compile the whole function into one graph: `fullgraph=True`, one callable for every batch size.

    Repeated blocks are marked in their source with `torch.compiler.nested_compile_region`. The graph then
    holds such a block once and calls it many times, so compiling eighty blocks takes as long as compiling
    one.
    """


@dataclass(frozen=True)
class Part:
    """A method that a function calls, named by its path from the function's object: "flow.advance".

    any_size: the arguments whose axes can have any size, with a name for each of their first axes and "" for
    an axis of fixed size: (("x", ("batch", "frames")), ...). Equal names mean equal sizes. A dot names an
    attribute of an argument: "seen.index". It is left out where the argument is of a type without it.
    """

    place: str
    any_size: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Parts:
    """Run the function as it is written, but compile each of these methods into one graph. This is for a
    function that calls them so often that one graph of everything would be too large."""

    parts: tuple[Part, ...]


Lowering = Eager | Whole | Parts


@dataclass(frozen=True)
class Strategy:
    """The lowering of each verb of a family. `fp32` documents what the model's code keeps in fp32."""

    step: Lowering = Whole()
    prefill: Lowering = Eager()  # `hidden` over many positions; runs once per request, with varying shapes
    render: Lowering = Eager()
    # On a GPU, every shape is recorded.
    gpu_prefill: Lowering = Whole()
    gpu_render: Lowering = Whole()
    fp32: tuple[str, ...] = ()
    # Whether `render` splits a batch itself on a CPU, into as many slots as fit the processor's caches.
    cuts_renders: bool = False
    # Sizes of recorded launches; a smaller batch is padded up to one of them. Steps are bound by reading
    # weights, and eight rows take less time than one or four (benchmarks/LOG.md); renders are bound by
    # arithmetic. No size is 1, which would need one more graph.
    batches: tuple[int, ...] = (8, 16, 32, 64, 96, 128, 192, 256)
    render_batches: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256)
    # Samples of a recorded render at most. For most codecs a larger one takes no less time for each, and all the
    # more memory (benchmarks/LOG.md).
    render_samples: int = 600_000
