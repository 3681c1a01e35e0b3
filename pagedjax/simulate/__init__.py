"""simulate"""

from pagedjax.simulate.config import SimConfig, collapsing_beams, parallel_beams
from pagedjax.simulate.run import simulate, sweep
from pagedjax.simulate.workload import Workload, independent
