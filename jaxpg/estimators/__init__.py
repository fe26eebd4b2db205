"""The mathematics: pure functions of arrays that know no model, no sampler and no file."""
