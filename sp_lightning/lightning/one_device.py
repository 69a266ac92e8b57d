"""The device of a strategy: one, which the user passed or Lightning chose."""

from __future__ import annotations

import torch

from ..errors import OptionError
from ..memory.device import check_supported

ONE = "1: Fabric streams through one device; a Trainer, or sp_lightning.stream(group=...), through several"
ONE_MACHINE = "1: several machines are not supported; use strategy='fsdp' there"


class OneDevice:
    """The one device of a strategy, for the Trainer or for Fabric: Lightning chooses it unless the user did."""

    _root_device: torch.device  # Lightning's
    _device_given: bool  # whether the user passed the device
    _parallel_devices: list[torch.device] | None = None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices that Lightning chose; None before that, as any other value would choose the accelerator."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices:
            self._take_devices(devices)
        self._parallel_devices = devices
        if devices and self._device_given and self._root_device.type != devices[0].type:
            raise OptionError(
                argument="device",
                found=str(self._root_device),
                allowed=f"on the chosen accelerator ('{devices[0]}'); choose its own, or pass no device here",
            )
        if devices and not self._device_given:
            check_supported(devices[0])
            self._root_device = devices[0]

    def _take_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise OptionError(argument="devices", found=len(devices), allowed=ONE)

    @property
    def num_nodes(self) -> int:
        """Always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        if count > 1:
            raise OptionError(argument="num_nodes", found=count, allowed=ONE_MACHINE)

    @property
    def _num_nodes(self) -> int:
        return 1

    @_num_nodes.setter
    def _num_nodes(self, count: int) -> None:  # Fabric sets it past the public one
        self.num_nodes = count
