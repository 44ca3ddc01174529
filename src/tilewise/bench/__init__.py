"""What `tilewise bench` runs: a few everyday calls next to torch's attention, each result checked before it is timed.

The project's own benchmark, with its peers, goals and plots, is in bench/ of the repository and uses this package's
clocks, memory meter and description of the machine.
"""

__all__: list[str] = []
