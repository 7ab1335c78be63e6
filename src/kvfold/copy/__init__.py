"""Copies between an engine's pages and the slots of a store."""
