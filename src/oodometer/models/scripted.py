"""TorchScript: hooks never run inside its graph, so the inputs of its linear layers are made further outputs."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

LINEAR = ("aten::linear", "aten::addmm")
LAST = 4
"""So many linear layers from the end are looked at."""


class Scripted(nn.Module):
    """A frozen copy of a TorchScript module that also runs its last linear layers as modules, for hooks to see."""

    def __init__(self, model: torch.jit.ScriptModule) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            # Freezing turns attributes into constants of the graph; numerics stay as they are.
            frozen = torch.jit.freeze(model, optimize_numerics=False)
        self.model = model
        self.run, layers = _with_inputs(frozen.graph.copy())
        self.layers = nn.ModuleDict({f"linear{place}": layer for place, layer in enumerate(layers)})

    def forward(self, x: Tensor) -> Any:
        output, *inputs = self.run(x)
        for given, layer in zip(inputs, self.layers.values(), strict=True):
            layer(given)
        return output


def _with_inputs(graph: Any) -> tuple[Any, list[nn.Linear]]:
    """A function that returns (output, input of each of the last linear layers), and these layers."""
    nodes = [node for node in graph.nodes() if node.kind() in LINEAR and _operands(node) is not None][-LAST:]
    output = next(graph.outputs())
    given = [_operands(node)[0] for node in nodes]  # type: ignore[index]
    joined = graph.create("prim::TupleConstruct", [output, *given])
    graph.appendNode(joined)
    joined.output().setType(torch._C.TupleType([value.type() for value in (output, *given)]))
    graph.eraseOutput(0)
    graph.registerOutput(joined.output())
    graph.eraseInput(0)  # the module itself, of which nothing is left after freezing
    create: Any = torch._C._create_function_from_graph
    return create("forward", graph), [_linear(*_operands(node)[1:]) for node in nodes]  # type: ignore[index]


def _operands(node: Any) -> tuple[Any, Tensor, Tensor | None] | None:
    """Input, weight (outputs × inputs) and bias of a linear layer with constant weights."""
    values = list(node.inputs())
    if node.kind() == "aten::linear":
        given, weight, bias = values[0], values[1].toIValue(), values[2].toIValue()
    else:
        bias, given, weight = values[0].toIValue(), values[1], values[2].toIValue()
        weight = None if weight is None else weight.T
    return (given, weight, bias) if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer
