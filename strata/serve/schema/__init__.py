"""The shapes of what the API takes and gives, as pydantic models: the source of its OpenAPI document."""
