"""How many requests fit on a device: the parts of `python -m pagedjax.capacity`."""

from pagedjax.planning.memory import CARDS as CARDS
from pagedjax.planning.memory import parse_memory as parse_memory
from pagedjax.planning.plan import DTYPE_BYTES as DTYPE_BYTES
from pagedjax.planning.plan import SCHEMES as SCHEMES
from pagedjax.planning.plan import Line as Line
from pagedjax.planning.plan import Plan as Plan
from pagedjax.planning.plan import Question as Question
from pagedjax.planning.plan import make_plan as make_plan
from pagedjax.planning.plan import parse_lengths as parse_lengths
