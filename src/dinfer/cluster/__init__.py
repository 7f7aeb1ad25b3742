"""Many engines, on Ray: workers for batches, replicas for a server."""
