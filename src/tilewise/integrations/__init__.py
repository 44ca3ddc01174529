"""Drop-in shapes of other people's interfaces: adapters that reshape arguments and call `tilewise.attention*`."""
