"""Check kvferry on a machine with a GPU, in steps that each run in a process of their own.

    python -m benchmarks.gpu_check [--rehearse] [--only STEP]... [--out FOLDER]

``make gpu`` runs it. The machine needs torch, a driver of kvferry that reaches GPU memory, and no
network; ``make gpu-bundle`` collects what else is needed. ``--rehearse`` runs every step on CPU
memory and with small sizes.
"""
