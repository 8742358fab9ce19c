"""What processes of ``warm`` have imported when they begin; nothing here starts a thread."""

import torch
import torch._dynamo  # DDP imports it when it wraps its first model
import torch.distributed
import torch.nn.parallel

import gradwire.adapters
import gradwire.cli
import gradwire.optim
import gradwire.planner
import gradwire.sharding

__all__ = ["gradwire", "torch"]
