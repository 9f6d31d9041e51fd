"""A bidirectional encoder of piano music, and MIDI files as its tokens."""
