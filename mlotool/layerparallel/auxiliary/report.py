"""The loss of a step, from the process of the last stage to all others, for their logs."""

import json

import torch
from torch import Tensor

from mlotool.core.loss_output import LossOutput
from mlotool.layerparallel.auxiliary.transport import ProcessTransport


class Report:
    """Takes the loss and the metrics of a step from the process of the last stage to all others, for their logs.

    All numbers travel as one tensor, and the metrics' names once in a run. The process of the last stage calls `send`,
    the others `expect` and, once their own stage is done, `receive`.

    Args:
        transport: between the stages.

    Raises:
        RunError: another process is gone.

    Example:
        With one stage there is nobody to send to:

        >>> transport = ProcessTransport.join(rank=0, num_ranks=1, num_stages=1, key="parallel")
        >>> output = LossOutput(torch.tensor(0.5), {"accuracy": torch.tensor(0.9)})
        >>> Report(transport).send(output, torch.float32, torch.device("cpu"))
    """

    def __init__(self, transport: ProcessTransport) -> None:
        self._transport = transport
        self._last = transport.stages.size - 1
        self._names: list[str] | None = None

    def send(self, output: LossOutput, dtype: torch.dtype, device: torch.device) -> None:
        """Send the loss and the metrics to all other stages, as one tensor (1 + number of metrics,).

        Args:
            output: what the last stage's process has computed.
            dtype: in which the numbers travel, that of the stages' states.
            device: of the numbers.
        """
        metrics = output.metrics
        values = [output.loss, *metrics.values()]
        packed = torch.stack([each.detach().to(device, dtype) for each in values])
        if self._names is None:
            self._names = list(metrics)
            text = torch.frombuffer(bytearray(json.dumps(self._names).encode()), dtype=torch.uint8).to(device)
            for stage in range(self._last):
                self._transport.send("length", self._last, stage, torch.tensor([len(text)], device=device))
                self._transport.send("names", self._last, stage, text)
        for stage in range(self._last):
            self._transport.send("output", self._last, stage, packed)

    def expect(self, dtype: torch.dtype, device: torch.device) -> LossOutput:
        """Begin to receive, and return a loss and metrics that are zero until `receive` has filled them.

        Args:
            dtype: of the numbers, that of the stages' states.
            device: of the numbers.
        """
        if self._names is None:
            [length] = self._await("length", torch.zeros(1, dtype=torch.int64, device=device)).tolist()
            text = self._await("names", torch.zeros(length, dtype=torch.uint8, device=device))
            self._names = json.loads(bytes(text.tolist()).decode())
        values = torch.zeros(1 + len(self._names), dtype=dtype, device=device)
        self._transport.expect("output", self._last, self._transport.stages.rank, values)
        return LossOutput(values[0], dict(zip(self._names, values[1:], strict=True)))

    def receive(self) -> None:
        """Wait until the tensors that `expect` has returned are filled."""
        self._transport.receive("output", self._last, self._transport.stages.rank)

    def _await(self, kind: str, blank: Tensor) -> Tensor:
        self._transport.expect(kind, self._last, self._transport.stages.rank, blank)
        return self._transport.receive(kind, self._last, self._transport.stages.rank)
