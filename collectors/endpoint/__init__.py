"""An endpoint of the collector's that speaks OpenAI's chat completions, for agents that run as they are."""
