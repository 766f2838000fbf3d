"""A segment as a TensorRT network: parsed, described layer by layer, with the products that multiply FP8.

Written against the Python API of TensorRT 10 and 11, which TensorRT-RTX shares; the module is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loka_serve.engines.tensorrt.runtimes.base import Segment
from loka_serve.errors import EngineError


class ErrorLog:
    """The errors and warnings that TensorRT reports while something is done; `logger` is what it takes."""

    def __init__(self, api: Any) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        severities = {int(api.ILogger.INTERNAL_ERROR), int(api.ILogger.ERROR)}
        log = self

        class Logger(api.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                api.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if int(severity) in severities:
                    log.errors.append(message)
                elif severity == api.ILogger.WARNING:
                    log.warnings.append(message)

        self.logger = Logger()

    def last_error(self, otherwise: str) -> str:
        """The last error on one line."""
        return " ".join(self.errors[-1].split()) if self.errors else otherwise


@dataclass(frozen=True)
class ParsedSegment:
    """A network and what must live as long as it does."""

    builder: Any
    network: Any
    parser: Any
    log: ErrorLog


def parse_segment(api: Any, segment: Segment) -> ParsedSegment:
    """Read a segment's ONNX file, strongly typed: types are the model's, never the builder's choice.

    Raises:
        EngineError: names the segment, the node and what the parser objects to.
    """
    log = ErrorLog(api)
    builder = api.Builder(log.logger)
    # TensorRT 11 knows no other networks and ignores the flag; 10 needs it for FP8.
    network = builder.create_network(1 << int(api.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = api.OnnxParser(network, log.logger)
    if not parser.parse_from_file(str(segment.file)):
        reasons = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise EngineError(
            f"segment {segment.name}: {api.__name__} {api.__version__} does not take {segment.file.name}: "
            f"{reasons[0] if reasons else log.last_error('no reason given')}"
        )
    return ParsedSegment(builder, network, parser, log)


@dataclass(frozen=True)
class Product:
    """A matrix product of a network: its name, and the types of what it multiplies, before any dequantization."""

    name: str
    inputs: str
    weight: str


def products(network: Any) -> list[Product]:
    """Every matrix product. `FP8` on both sides is what a builder fuses into one FP8 product."""
    producers = {}
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    for layer in layers:
        for index in range(layer.num_outputs):
            producers[layer.get_output(index).name] = layer
    found = []
    for layer in layers:
        if layer.type.name == "MATRIX_MULTIPLY":
            sides = [_stored_type(layer.get_input(side), producers) for side in (0, 1)]
            found.append(Product(layer.name, *sides))
    return found


def _stored_type(tensor: Any, producers: dict[str, Any]) -> str:
    """Type of a tensor, or of what it was dequantized from, transposed or not."""
    layer = producers.get(tensor.name)
    while layer is not None and layer.type.name == "SHUFFLE":
        tensor = layer.get_input(0)
        layer = producers.get(tensor.name)
    if layer is not None and layer.type.name == "DEQUANTIZE":
        tensor = layer.get_input(0)
    return str(tensor.dtype.name)
