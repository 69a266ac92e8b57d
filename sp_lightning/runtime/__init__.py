"""One step: the window, gradients, the engine, entries into the module, the handle."""
