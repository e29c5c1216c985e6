"""The daemon: a pure state machine in a thin shell."""
