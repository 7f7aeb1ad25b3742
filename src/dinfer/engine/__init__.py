"""The engine: sequences, scheduler, K/V pool, runner, loading, and the offline and asyncio fronts
over them.
"""
