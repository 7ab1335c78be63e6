"""The store of one machine: arena, index, policy, tiers, server and client."""
