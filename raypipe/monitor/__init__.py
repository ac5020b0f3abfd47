"""Records for Azure Monitor: what they hold, where they wait, and how they are sent."""
