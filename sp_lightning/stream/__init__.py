"""The stream of a module's weights between host and device."""
