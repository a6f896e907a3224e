"""Layers of attention, for models of your own: every form of it, with positions, caches and observables."""

from clearhead.nn.convert import llama_to_gqa, mha_to_gqa
from clearhead.nn.decoder import Block, Decoder
from clearhead.nn.layer import MultiHeadAttention
from clearhead.nn.positions import RelativePositions, Rotary
from clearhead.nn.torch_layer import torch_masks

__all__ = [
    "Block",
    "Decoder",
    "MultiHeadAttention",
    "RelativePositions",
    "Rotary",
    "llama_to_gqa",
    "mha_to_gqa",
    "torch_masks",
]
