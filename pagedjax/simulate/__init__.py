"""simulate"""

from pagedjax.simulate.config import SimConfig
from pagedjax.simulate.run import simulate, sweep
from pagedjax.simulate.workload import Workload, independent
