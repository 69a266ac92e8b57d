"""One step: the window, the engine, entries into the module, the handle."""
