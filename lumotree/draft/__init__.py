"""Sources of draft tokens: each proposes, none decides."""
