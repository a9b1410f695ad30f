"""The agent study: coding tasks worked on by an agent through each serving arm, and graded."""
