"""A pretended GPU, good enough for tracing, lowering, building kernels and counting.

    cards       a table of what PyTorch, Triton and a roofline need to know about a device
    device      `pretend`: makes torch and Triton believe in a GPU
    shapes      a family of any size without its weights: fake tensors
    launches    what would have been launched, and what would have made the host wait
    kernels     inductor's Triton kernels: kept, counted, built to cubins
    l2          which bytes of a launch reach the card's memory
    parts       a family's step, prefill and render through the server's own runner
    costs       times of counted launches, by a roofline
    simulation  the project's scheduler on a virtual clock

Nothing can be launched, and no time is measured. `benchmarks/rehearse.py` is the command, and
`benchmarks/predict.py` turns its counts into times.
"""
