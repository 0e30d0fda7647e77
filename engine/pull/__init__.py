"""The embedded default model: fetched once, converted to DeepSeek-V3.2 form, kept in the cache."""
