"""A GPU that is not there, as far as tracing, lowering, building kernels and counting need one.

cards      what PyTorch and Triton ask of a device, and what a roofline needs of it, as a table
device     `pretend`: here torch and Triton believe in one
shapes     a family of any size without its weights: fake tensors
launches   what would have been launched, and what would have made the host wait
kernels    inductor's Triton kernels: kept, counted, built to cubins
parts      a family's step, prefill and render through the server's own runner

Nothing can be launched, and no time is measured. `benchmarks/rehearse.py` is the command,
`benchmarks/predict.py` makes times of its counts.
"""
