"""Small matrices are fastest on one thread; on a busy machine more threads wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
