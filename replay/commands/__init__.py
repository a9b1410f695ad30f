"""One thin file per command; heavy imports happen inside the command that needs them."""
