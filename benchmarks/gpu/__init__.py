"""Everything that only a GPU can show, in one command: `python -m benchmarks.gpu --minutes 8 --out DIR`.

A check is a file in checks/. It fills in rows, each a mapping of figures, and a call of it is a job, which knows the
device, the time that is left and the rows of earlier calls. Where programs are compared, each is a rival, and what is
timed is one cycle of it: a lower and an upper step of Meta-Weight-Net.
"""
