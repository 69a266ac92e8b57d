"""Memory: units and their layouts, the device, page-locked and staged host memory, the two copies of a unit."""
