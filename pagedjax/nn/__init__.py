"""Flax NNX modules that other people's models import: paged attention, rotary embeddings, norms."""

from pagedjax.nn.attention import PagedAttention as PagedAttention
from pagedjax.nn.batch import Batch as Batch
from pagedjax.nn.linear import linear as linear
from pagedjax.nn.norms import centered_rms_norm as centered_rms_norm
from pagedjax.nn.norms import rms_norm as rms_norm
from pagedjax.nn.rotary import RotaryTable as RotaryTable
from pagedjax.nn.rotary import apply_rotary as apply_rotary
from pagedjax.nn.rotary import rotary_table as rotary_table
