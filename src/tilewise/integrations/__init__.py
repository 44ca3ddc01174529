"""Adapters with the interfaces of other libraries: they reshape arguments and call `tilewise.attention*`."""
