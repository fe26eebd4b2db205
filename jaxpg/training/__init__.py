"""The train state and the updates that map it to its successor."""
