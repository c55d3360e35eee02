"""What can stand in for a text's KV cache: arms, the memories they build, and questions to those.

Axes: see npqwen; here also M records (the text's tokens after the sinks), C centroids or anchors, N simulated queries,
R rank, P pages.
"""

from kvmem.ask import ask, nll
from kvmem.memory import Memory, attend, build
from kvmem.reading import Reading, Settings, read
from kvmem.spec import parse
from npqwen.attention import State

__all__ = ["Memory", "Reading", "Settings", "State", "ask", "attend", "build", "nll", "parse", "read"]
