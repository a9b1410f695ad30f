"""The hybrid model: config, checkpoint, forward over tree rows, MTP head."""
