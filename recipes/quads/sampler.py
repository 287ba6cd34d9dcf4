"""A replay buffer for small models, whose steps are shorter than the 2 s between verl's looks at the TransferQueue."""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class FastPollReplayBuffer(ReplayBuffer):
    """verl's ReplayBuffer that looks every 0.1 s. Select with `trainer.v1.sampler.custom_sampler.{path,name}`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "poll_interval": 0.1})
