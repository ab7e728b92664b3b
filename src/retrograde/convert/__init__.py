"""From any residual model to a momentum network, in place."""
