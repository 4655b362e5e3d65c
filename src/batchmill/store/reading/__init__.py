"""A store for people who read it with their own tools: Arrow tables, data frames, SQL views."""
