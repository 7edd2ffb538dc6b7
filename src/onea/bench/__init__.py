"""How fast this machine learns and answers, next to plain baselines measured in the same run."""
