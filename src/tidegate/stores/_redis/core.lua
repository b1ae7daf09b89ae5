-- The core for Redis and Valkey: the functions of core/algorithms.py and core/decision.py, with the same names in the same
-- order. Numbers are doubles; all are integers below 2^53 in absolute value, so that results are the same as in Python.
--
-- The server runs this file once, at the first call of a library of functions (see library.py), and then calls `one` and
-- `batch`. Where functions are forbidden, it is a script, which runs from its first line each time and calls `batch`. Both
-- have the same arguments:
--
--   keys     for every ask: the key of its entry, then one key for each of its limits that keeps a log; keys of values
--   args[1]  groups of asks, as doubles (see protocol.py): verb, number of asks, operations on values (an index into
--            args[2…], or 0); if the verb is above TIMED: now, slack, at; then for each ask its policy (an index into
--            args[2…]) and a cost per limit
--   args[2…] policies: for each limit its numbers; and operations on values (see build_values)
--   reply    one string of 64-bit integers: for each group whether it is allowed and the instant, then for each limit
--            remaining (negative if more is in use than the limit allows), retry and reset, then the values that were
--            read; or 2 and an instant whose calendar window the client must send; or 3, the number of a write whose
--            condition does not hold, and the value; or 4 and the number of a write for which the collection has no room;
--            or 5, a 0, and why one of its keys cannot be used: nothing was charged or written.
--            Bytes are their length, then the bytes, padded to a multiple of 8
--
-- Groups are decided one after another, each all or nothing. An entry holds a record for each limit that has a state:
-- count, id, owner, expires, then `count` numbers. `id` is the name and algorithm of the limit, `owner` the complete limit
-- that wrote the state, `expires` the expiry of the state under that limit. Log entries (time, running sum) are in a
-- separate string, 16 bytes each; a decision reads only the entries that a bisection needs.

local NONE = -9007199254740992  -- no instant given
local ALTERNATIVE = 8  -- added to a verb: see `batch`
local TIMED = 16  -- added to a verb: instants follow
local SLACK = 1000  -- milliseconds for which a key is kept after its state has expired
local call, pack, unpack_ints, sub, rep = redis.call, struct.pack, struct.unpack, string.sub, string.rep

-- What belongs to one call; `start` sets it.
local keys, args, clock, answer, answered, reply

local MAX, NEVER, MARKS = 9007199254740991, -1, 4
local FORMAT = 65536  -- added to the count of each record; a later format adds a multiple of it
local EMPTY, BLANK = {}, rep('\0', 16)
local concat, max, min = table.concat, math.max, math.min

-- ---- integers -----------------------------------------------------------------------------------------------------

-- Exact: since |a| < 2^53, the error of a / b is less than 1 / b, so rounding never reaches the next integer.
local function floor_div(a, b)
  local quotient = a / b
  return quotient - quotient % 1
end

local function ceil_div(a, b)
  local quotient = -a / b
  return quotient % 1 - quotient
end

local CHUNK = 1000  -- numbers at once: all of them pass through Lua's stack

local doubles, ints = {}, {}  -- formats of numbers, by their count

local function format_of(formats, kind, count)
  local format = formats[count]
  if not format then
    format = '<' .. rep(kind, count)
    formats[count] = format
  end
  return format
end

local function read_doubles(bytes)
  local count = #bytes / 8
  if count <= CHUNK then return {unpack_ints(doubles[count] or format_of(doubles, 'd', count), bytes)}, count end
  local numbers = {}
  for from = 1, count, CHUNK do
    local some = {unpack_ints('<' .. rep('d', min(CHUNK, count - from + 1)), bytes, from * 8 - 7)}
    for i = 1, #some - 1 do numbers[from + i - 1] = some[i] end  -- the last value is the position after the read
  end
  return numbers, count
end

local function write_ints(numbers, count)
  if count <= CHUNK then return pack(ints[count] or format_of(ints, 'i8', count), unpack(numbers, 1, count)) end
  local some = {}
  for from = 1, count, CHUNK do
    local to = min(count, from + CHUNK - 1)
    some[#some + 1] = pack('<' .. rep('i8', to - from + 1), unpack(numbers, from, to))
  end
  return concat(some)
end

-- Add the numbers so far to the reply.
local function flush()
  reply = reply or {}
  if answered > 0 then reply[#reply + 1] = write_ints(answer, answered) end
  answered = 0
end

local function write_bytes(bytes)
  answered = answered + 1
  answer[answered] = #bytes
  flush()
  reply[#reply + 1] = bytes .. rep('\0', -#bytes % 8)
end

-- Answer, in place of all that follows `parts` parts of the reply and `count` numbers, that a group cannot be decided.
local function refuse(parts, count, reason)
  for i = reply and #reply or 0, parts + 1, -1 do reply[i] = nil end
  answer[count + 1], answer[count + 2] = 5, 0
  answered = count + 2
  write_bytes(reason)
end

-- Return the state, or nil if it had expired under the limit that wrote it before that limit was changed.
local function current(state, limit, now)
  if not state or not state.owner or state.expires > now then return state end
  return state.owner == limit.owner and not state.seen and state
end

-- ---- token_bucket: level, at, marks; a stored state also has scale, rate and capacity of the limit that wrote it --

local function build_bucket()
  local _view_changed, refill, topped_up, rescale, raise_marks

  local function charge_bucket(state, limit, cost, now)
    if cost > limit.burst then return false end
    local marks, level = EMPTY, limit.capacity
    if state then marks, level, now = refill(state, limit, now) end
    level = level - cost * limit.scale
    return level >= 0 and {level = level, at = now, marks = marks}
  end

  local function view_bucket(state, limit, cost, now)
    local _, level, seen = nil, limit.capacity, now
    if state then _, level, seen = refill(state, limit, now) end
    if state and state.owner and state.owner ~= limit.owner and state.expires > now then
      return _view_changed(state, limit, cost, now, level)
    end
    local missing = limit.capacity - level
    local retry = 0
    if cost > limit.burst then
      retry = NEVER
    elseif cost > 0 and cost * limit.scale > level then
      retry = seen - now + ceil_div(cost * limit.scale - level, limit.rate)
    end
    return floor_div(level, limit.scale), retry, missing > 0 and seen - now + ceil_div(missing, limit.rate) or 0
  end

  function _view_changed(state, limit, cost, now, level)
    local scale, rate, capacity = unpack_ints('<ddd', state.value, state.from + 48)
    local retry = 0
    if cost > limit.burst then
      retry = NEVER
    elseif cost > 0 and cost * limit.scale > level then
      local filled = state.at + ceil_div(cost * limit.scale - rescale(state.level, scale, limit), limit.rate)
      local before = state.expires
      if cost <= capacity / scale then before = state.at + ceil_div(cost * scale - state.level, rate) end
      retry = min(max(filled, before), state.expires) - now
    end
    return floor_div(level, limit.scale), retry, state.expires - now
  end

  function refill(state, limit, now)
    if state.at == now and not state.owner then return state.marks, state.level, now end
    local level, passed = state.level, now > state.at and now - state.at or 0
    if not state.owner or state.owner == limit.owner then
      level = topped_up(level, limit, passed)
      return raise_marks(state.marks, level, limit), level, state.at + passed
    end
    if state.expires <= now then return EMPTY, limit.capacity, now end
    local scale, rate, capacity = unpack_ints('<ddd', state.value, state.from + 48)
    local before = topped_up(level, {rate = rate, capacity = capacity}, passed)
    local after = topped_up(rescale(level, scale, limit), limit, passed)
    return EMPTY, min(rescale(before, scale, limit), after), state.at + passed
  end

  function topped_up(level, limit, passed)
    if passed == 0 then return level end
    if passed > floor_div(limit.capacity - level, limit.rate) then return limit.capacity end
    return level + passed * limit.rate
  end

  function rescale(level, scale, new)
    local permits = floor_div(level, scale)
    local part = level - permits * scale
    if new.scale > floor_div(MAX, scale) then part = 0 end
    if permits >= new.burst then return new.capacity end
    if permits <= floor_div(new.floor, new.scale) then return new.floor end
    return permits * new.scale + floor_div(part * new.scale, scale)
  end

  local function adjust_bucket(state, limit, delta, now, at)
    local marks, level = EMPTY, limit.capacity
    if state then marks, level, now = refill(state, limit, now) end
    if delta >= 0 then
      local most = level - limit.floor
      local taken = delta > floor_div(most, limit.scale) and most or delta * limit.scale
      level = level - taken
      if at then
        local lowered = {}
        for i = 1, #marks, 2 do
          lowered[i], lowered[i + 1] = marks[i], marks[i] >= at and marks[i + 1] - taken or marks[i + 1]
        end
        marks = lowered
      end
    else
      local peak = level
      if at then
        peak = limit.capacity
        for i = at <= now and #marks - 1 or 0, 1, -2 do
          if marks[i] <= at then peak = marks[i + 1] break end
        end
      end
      local free = limit.capacity - peak
      local credit = -delta > floor_div(free, limit.scale) and free or -delta * limit.scale
      if credit == 0 then return state end
      if at then
        local raised = {}
        for i = 1, #marks, 2 do
          raised[i] = marks[i]
          raised[i + 1] = marks[i] <= at and max(marks[i + 1], peak + credit) or marks[i + 1] + credit
        end
        marks = raised
      end
      level = level + credit
    end
    return level < limit.capacity and {level = level, at = now, marks = marks}
  end

  local function mark_bucket(state)
    local marks, old = {}, state.marks
    for i = 1, #old, 2 do
      if old[i] < state.at then marks[#marks + 1], marks[#marks + 2] = old[i], old[i + 1] end
    end
    marks[#marks + 1], marks[#marks + 2] = state.at, state.level
    if #marks > 2 * MARKS then
      local least = 3
      for i = 5, #marks, 2 do
        if marks[i - 1] - marks[i + 1] < marks[least - 1] - marks[least + 1] then least = i end
      end
      table.remove(marks, least)
      table.remove(marks, least)
    end
    return {level = state.level, at = state.at, marks = marks}
  end

  local function expires_bucket(state, limit)
    return state.at + ceil_div(limit.capacity - state.level, limit.rate)
  end

  function raise_marks(marks, level, limit)
    if level >= limit.capacity then return EMPTY end
    local count = #marks
    if count == 0 or marks[count] >= level then return marks end
    local kept = {}
    for i = 1, count, 2 do
      kept[i] = marks[i]
      if marks[i + 1] < level then kept[i + 1] = level break end
      kept[i + 1] = marks[i + 1]
    end
    return kept
  end

  return {charge = charge_bucket, view = view_bucket, adjust = adjust_bucket, expires = expires_bucket,
          mark = mark_bucket}
end

-- ---- fixed_window and calendar_window: used, start, ends; seen, ended and older if it carries older windows --------

local function build_windows()
  local MAX_OLDER = 4
  local _fixed, _calendar, window, _seen, _last_end, _windows, _sum, _counted
  local _charge_window, _taken, _view_window, _adjust_window

  local function charge_fixed(state, limit, cost, now)
    state = current(state, limit, now)
    local start, ends = _fixed(state, limit, now)
    return _charge_window(state, limit, cost, now, start, ends)
  end

  local function view_fixed(state, limit, cost, now)
    state = current(state, limit, now)
    local start, ends = _fixed(state, limit, now)
    return _view_window(state, limit, cost, now, start, ends)
  end

  function _fixed(state, limit, now)
    now = _seen(state, now)
    local start = state and now - state.start < limit.length and state.start or now
    return start, start + limit.length
  end

  local function adjust_fixed(state, limit, delta, now, at)
    state = current(state, limit, now)
    local start, ends = _fixed(state, limit, now)
    return _adjust_window(state, limit, delta, now, at, start, ends)
  end

  local function expires_fixed(state)
    return _last_end(state)
  end

  local function charge_calendar(state, limit, cost, now)
    state = current(state, limit, now)
    local start, ends = _calendar(state, limit, now)
    return _charge_window(state, limit, cost, now, start, ends)
  end

  local function view_calendar(state, limit, cost, now)
    state = current(state, limit, now)
    local start, ends = _calendar(state, limit, now)
    return _view_window(state, limit, cost, now, start, ends)
  end

  function _calendar(state, limit, now)
    return window(limit, _seen(state, now))
  end

  -- Lua has no time zones: the client sends the windows it expects to be needed, and others on request.
  function window(limit, instant)
    local windows = limit.windows
    for i = 1, #windows, 2 do
      if windows[i] <= instant and instant < windows[i + 1] then return windows[i], windows[i + 1] end
    end
    error({need = instant})
  end

  local function adjust_calendar(state, limit, delta, now, at)
    state = current(state, limit, now)
    local start, ends = _calendar(state, limit, now)
    return _adjust_window(state, limit, delta, now, at, start, ends)
  end

  local function expires_calendar(state)
    return _last_end(state)
  end

  function _seen(state, now)
    if not state then return now end
    return max(now, state.seen or state.start)
  end

  function _last_end(state)
    local last = state.ends
    for i = 3, #state.older, 3 do last = max(last, state.older[i]) end
    return last
  end

  -- The common state: only the window [start, ends).
  local function usual(state, start, ends)
    return not state.seen and state.start == start and state.ends == ends
  end

  -- Append a window to a flat list of windows, three numbers each: used, start, end.
  local function add(windows, used, start, ends)
    local count = #windows
    windows[count + 1], windows[count + 2], windows[count + 3] = used, start, ends
  end

  function _windows(state)
    if not state then return {} end
    local windows = {unpack(state.older)}
    add(windows, state.used - _sum(state.older), state.start, state.ends)
    return windows
  end

  function _sum(windows)
    local sum = 0
    for i = 1, #windows, 3 do sum = sum + windows[i] end
    return sum
  end

  function _counted(state, limit, now, start, ends)
    local windows, counted, expires = _windows(state), {}, _last_end(state)
    now = _seen(state, now)
    local since, ended = state.start, state.ended
    local overlaps, back = start <= (state.seen or since), start < since
    if limit.algorithm == 2 then
      overlaps = start == since
      back = overlaps and limit.length > state.ends - since
    end
    local again = overlaps and min(ends, expires) or 0
    for i = 1, #windows, 3 do
      if windows[i + 2] > now or overlaps then add(counted, windows[i], windows[i + 1], max(windows[i + 2], again)) end
    end
    local used = _sum(counted)
    ended = ended + min(_sum(windows) - used, MAX - ended)
    if back then
      add(counted, min(ended, MAX - used), since, again)
      ended = 0
    end
    return counted, ended
  end

  function _charge_window(state, limit, cost, now, start, ends)
    if not state or usual(state, start, ends) then
      local used = state and state.used or 0
      return cost <= limit.quota - used and {used = used + cost, start = start, ends = ends, ended = 0, older = EMPTY}
    end
    local counted = _counted(state, limit, now, start, ends)
    return cost <= limit.quota - _sum(counted) and _taken(state, limit, cost, now, start, ends)
  end

  function _taken(state, limit, cost, now, start, ends)
    if not state or _last_end(state) <= now then
      return {used = cost, start = start, ends = ends, ended = 0, older = EMPTY}
    end
    local counted, ended = _counted(state, limit, now, start, ends)
    local used, older = _sum(counted), {}
    for i = 1, #counted, 3 do
      if counted[i + 2] > ends and counted[i] > 0 then add(older, counted[i], counted[i + 1], counted[i + 2]) end
    end
    if #older > 3 * MAX_OLDER then
      older = {older[1] + older[4], min(older[2], older[5]), max(older[3], older[6]), unpack(older, 7)}
    end
    local seen = (#older > 0 or ended > 0) and max(start, _seen(state, now)) or nil
    return {used = used + min(cost, MAX - used), start = start, ends = ends, seen = seen, ended = ended, older = older}
  end

  function _view_window(state, limit, cost, now, start, ends)
    local counted, order = {}, {}
    if state and usual(state, start, ends) then
      add(counted, state.used, start, ends)
    elseif state then
      counted = _counted(state, limit, now, start, ends)
    end
    local left, reset, retry = limit.quota - _sum(counted), 0, 0
    for i = 1, #counted, 3 do
      order[#order + 1] = i
      reset = max(reset, counted[i + 2] - now)
    end
    if cost > limit.quota then
      retry = NEVER
    elseif cost > max(0, left) then
      local free = left
      if #order > 1 then table.sort(order, function(one, other) return counted[one + 2] < counted[other + 2] end) end
      for _, i in ipairs(order) do
        free = free + counted[i]
        retry = counted[i + 2] - now
        if cost <= free then break end
      end
    end
    return left, retry, reset
  end

  function _adjust_window(state, limit, delta, now, at, start, ends)
    local windows, held = _windows(state), {}
    now = _seen(state, now)
    for i = 1, #windows, 3 do
      if windows[i + 2] > now and (not at or (windows[i + 1] <= at and at < windows[i + 2])) then held[#held + 1] = i end
    end
    if delta > 0 and (not at or (#held == 0 and start <= at and at <= now)) then
      return _taken(state, limit, delta, now, start, ends)
    end
    if #held == 0 then return state end
    local total = _sum(windows)
    for i = #held, 1, -1 do
      local place = held[i]
      local change = min(max(delta, -windows[place]), MAX - total)
      windows[place] = windows[place] + change
      delta = delta - change
      if delta >= 0 then break end
    end
    local count, kept = #windows, {}
    for i = 1, count - 3, 3 do
      if windows[i] > 0 then add(kept, windows[i], windows[i + 1], windows[i + 2]) end
    end
    local used, since, until_ = windows[count - 2], windows[count - 1], windows[count]
    if used == 0 and #kept == 0 then return false end
    local own = #kept == 0 and state.ended == 0 and since == start and until_ == ends
    return {used = used + _sum(kept), start = since, ends = until_, seen = not own and (state.seen or now) or nil,
            ended = state.ended, older = kept}
  end

  return {charge = charge_fixed, view = view_fixed, adjust = adjust_fixed, expires = expires_fixed},
    {charge = charge_calendar, view = view_calendar, adjust = adjust_calendar, expires = expires_calendar}
end

-- ---- sliding_window: count, previous, start, length ---------------------------------------------------------------

local function build_sliding()
  local _view_resized, _weigh, _sliding, _rolled, heaviest

  local function charge_sliding(state, limit, cost, now)
    local count, previous, start = _sliding(state, limit, now)
    local left = max(0, limit.quota - count) - _weigh(limit, previous, start + limit.length - now)
    return cost <= left and {count = count + cost, previous = previous, start = start, length = limit.length}
  end

  local function view_sliding(state, limit, cost, now)
    local count, previous, start, length = _rolled(state, limit, now)
    local ahead = start + length - now
    if length ~= limit.length then return _view_resized(limit, cost, count, previous, ahead, length) end
    local quota, ticks = limit.quota, floor_div(length, limit.tick)
    local left = quota - count - min(_weigh(limit, previous, ahead), MAX - count)
    local retry = 0
    if cost > quota then
      retry = NEVER
    elseif cost > max(0, left) then
      if cost <= quota - count then
        retry = ahead - floor_div((quota - count - cost) * ticks, previous) * limit.tick
      else
        retry = ahead + length - floor_div((quota - cost) * ticks, count) * limit.tick
      end
    end
    return left, retry, count > 0 and ahead + length or previous > 0 and ahead or 0
  end

  function _view_resized(limit, cost, count, previous, ahead, length)
    local left, retry = limit.quota - (count + previous), 0
    if cost > limit.quota then
      retry = NEVER
    elseif cost > max(0, left) then
      retry = cost <= limit.quota - count and ahead or ahead + length
    end
    return left, retry, count > 0 and ahead + length or previous > 0 and ahead or 0
  end

  function _weigh(limit, previous, ahead)
    local ticks = floor_div(limit.length, limit.tick)
    return ceil_div(previous * min(ticks, ceil_div(ahead, limit.tick)), ticks)
  end

  function _sliding(state, limit, now)
    local count, previous, start, length = _rolled(state, limit, now)
    if length == limit.length then return count, previous, start end
    return count + previous, 0, floor_div(max(now, start), limit.length) * limit.length
  end

  function _rolled(state, limit, now)
    state = current(state, limit, now)
    if not state then return 0, 0, floor_div(now, limit.length) * limit.length, limit.length end
    local count, previous, start, length = state.count, state.previous, state.start, state.length
    local ended = floor_div(max(now, start) - start, length)
    if ended > 0 then
      count, previous, start = 0, ended == 1 and count or 0, start + ended * length
    end
    if state.owner and state.owner ~= limit.owner then
      local most = heaviest(limit)
      count, previous = min(most, count), min(most, previous)
      if length ~= limit.length then previous = min(previous, most - count) end
    end
    return count, previous, start, length
  end

  local function adjust_sliding(state, limit, delta, now, at)
    local count, previous, start = _sliding(state, limit, now)
    local most = heaviest(limit)
    if not at or (start <= at and at < start + limit.length) then
      count = max(0, count + min(delta, most - count))
    elseif start - limit.length <= at and at < start then
      previous = max(0, previous + min(delta, most - previous))
    else
      return state
    end
    return (count > 0 or previous > 0) and {count = count, previous = previous, start = start, length = limit.length}
  end

  function heaviest(limit)
    return floor_div(MAX, floor_div(limit.length, limit.tick))
  end

  local function expires_sliding(state, limit)
    return state.start + limit.length * (state.count > 0 and 2 or 1)
  end

  return {charge = charge_sliding, view = view_sliding, adjust = adjust_sliding, expires = expires_sliding}
end

-- ---- sliding_log and concurrency: head, tail, base, first, last, total --------------------------------------------

local function build_log()
  local _log, _logged, _correct, entry, sum_before, bisect_left, bisect_right, rebase, shifted
  --
  -- Entries [head, tail) of the string are live; `base` is the running sum before them, `total` that of the last entry,
  -- `first` and `last` are the times of the first and last entry. A transition only records what to write (`writes`, and
  -- `cut`, the number of entries to remove at the front): it is written once every limit has allowed the call.

  -- Append an entry.
  local function append(log, now, cost)
    if log.total + cost > MAX then log = rebase(log) end
    local total = log.total + cost
    local writes = {unpack(log.writes)}
    writes[#writes + 1] = {log.tail, pack('<i8i8', now, total)}
    local first = log.tail > log.head and log.first or now
    return _logged({key = log.key, head = log.head, tail = log.tail + 1, base = log.base, first = first, last = now,
                    total = total, writes = writes})
  end

  local function charge_log(state, limit, cost, now)
    local log
    log, now = _log(state, limit, now)
    if cost > limit.quota - (log.total - log.base) then return false end
    return append(log, now, cost)
  end

  local function view_log(state, limit, cost, now)
    local log = _log(state, limit, now)
    if not state or log.head == log.tail then return limit.quota, cost > limit.quota and NEVER or 0, 0 end
    local left = limit.quota - (log.total - log.base)
    local ends, retry = log.last + limit.length, 0
    if state.owner and state.owner ~= limit.owner then ends = min(ends, state.expires) end
    if cost > limit.quota then
      retry = NEVER
    elseif cost > max(0, left) then
      local time = entry(log, bisect_left(log, 2, log.total - (limit.quota - cost), log.head, log.tail))
      retry = min(ends, time + limit.length) - now
    end
    return left, retry, ends - now
  end

  function _log(state, limit, now)
    state = current(state, limit, now)
    if state then now = max(now, state.last) end
    if not state or state.last <= now - limit.length then
      return {head = 0, tail = 0, base = 0, first = 0, last = 0, total = 0, writes = EMPTY}, now
    end
    local log = {key = state.key, head = state.head, tail = state.tail, base = state.base, first = state.first,
                 last = state.last, total = state.total, writes = state.writes}
    if state.first <= now - limit.length then
      log.head = bisect_right(state, now - limit.length, state.head + 1, state.tail)
      log.base = sum_before(state, log.head)
      log.first = entry(state, log.head)
    end
    return log, now
  end

  function _logged(log)
    if log.head == log.tail then return false end
    if log.head > 16 and log.head * 2 > log.tail then
      log.cut = log.head
      log.head, log.tail = 0, log.tail - log.head
    end
    return log
  end

  local function adjust_log(state, limit, delta, now, at)
    local log
    log, now = _log(state, limit, now)
    if not at then return _correct(log, delta, now, log.head, log.tail) end
    local first = at > now - limit.length and bisect_left(log, 1, at, log.head, log.tail) or log.tail
    if first == log.tail then return state end
    return _correct(log, delta, now, first, bisect_right(log, (entry(log, first)), first, log.tail))
  end

  -- The slots whose lease ends first are at the front: their cost moves to `base`, and no entry needs to be written.
  local function adjust_slots(state, limit, delta, now, at)
    if at then return adjust_log(state, limit, delta, now, at) end
    local log
    log, now = _log(state, limit, now)
    if log.head == log.tail then return _correct(log, delta, now, log.head, log.tail) end
    local head, base = log.head, log.base
    while head < log.tail do
      local _, sum = entry(log, head)
      local change = min(max(delta, base - sum), MAX - (log.total - base))
      base = base - change
      delta = delta - change
      if base == sum then head = head + 1 end
      if delta == 0 or base ~= sum then break end
    end
    local first = head < log.tail and entry(log, head) or 0
    return _logged({key = log.key, head = head, tail = log.tail, base = base, first = first, last = log.last,
                    total = log.total, writes = log.writes})
  end

  -- Change the costs of entries [first, last), the latest first, by `delta` in total; entries with a cost of 0 are
  -- removed. A positive delta on an empty log adds an entry.
  function _correct(log, delta, now, first, last)
    if log.head == log.tail then return delta > 0 and append(log, now, delta) end
    if log.total + max(0, delta) > MAX then
      first, last = first - log.head, last - log.head
      log = rebase(log)
    end
    local total, i, kept = log.total - log.base, last, {}
    local change = 0
    while i > first and delta ~= 0 do
      i = i - 1
      local time, sum = entry(log, i)
      local cost = sum - sum_before(log, i)
      local step = min(max(delta, -cost), MAX - total)
      total, delta, change = total + step, delta - step, change + step
      if cost + step > 0 then table.insert(kept, 1, {time, cost + step}) end
    end
    local sum, rows = sum_before(log, i), {}
    for _, row in ipairs(kept) do
      sum = sum + row[2]
      rows[#rows + 1] = pack('<i8i8', row[1], sum)
    end
    local writes = {unpack(log.writes)}
    writes[#writes + 1] = {i, table.concat(rows) .. shifted(log, last, log.tail, change)}
    local tail = log.tail - (last - i - #kept)
    local new = {key = log.key, head = log.head, tail = tail, base = log.base, first = log.first, last = log.last,
                 total = log.total + change, writes = writes}
    if tail > log.head then
      if i == log.head then new.first = #kept > 0 and kept[1][1] or entry(log, last) end
      if last == log.tail then new.last = #kept > 0 and kept[#kept][1] or entry(log, i - 1) end
    end
    return _logged(new)
  end

  local function expires_log(state, limit)
    return state.last + limit.length
  end

  function entry(log, i)
    local bytes
    if log.copy then
      bytes = string.sub(log.copy, i * 16 + 1, i * 16 + 16)
    else
      bytes = call('GETRANGE', log.key, i * 16, i * 16 + 15)
    end
    if #bytes < 16 or bytes == BLANK then error({lost = log.key}) end  -- the server evicted it
    return unpack_ints('<i8i8', bytes)
  end

  function sum_before(log, i)
    if i == log.head then return log.base end
    local _, sum = entry(log, i - 1)
    return sum
  end

  function bisect_left(log, field, wanted, low, high)
    while low < high do
      local middle = floor_div(low + high, 2)
      if select(field, entry(log, middle)) < wanted then low = middle + 1 else high = middle end
    end
    return low
  end

  function bisect_right(log, wanted, low, high)
    while low < high do
      local middle = floor_div(low + high, 2)
      if wanted < (entry(log, middle)) then high = middle else low = middle + 1 end
    end
    return low
  end

  -- Subtract `base` from all sums. Only quotas near 2^53 need this: their sums would exceed the integers of a double.
  function rebase(log)
    local copy = shifted(log, log.head, log.tail, -log.base)
    return {key = log.key, head = 0, tail = log.tail - log.head, base = 0, first = log.first, last = log.last,
            total = log.total - log.base, writes = {{0, copy}}, copy = copy}
  end

  -- Add `change` to the sums of entries [from, to): read all at once, write in chunks.
  function shifted(log, from, to, change)
    if from >= to then return '' end
    local bytes
    if log.copy then
      bytes = string.sub(log.copy, from * 16 + 1, to * 16)
    else
      bytes = call('GETRANGE', log.key, from * 16, to * 16 - 1)
    end
    if #bytes < (to - from) * 16 then error({lost = log.key}) end
    local rows, left, place = {}, 2 * (to - from), 1
    while left > 0 do
      local count = min(left, CHUNK)
      local format = '<' .. rep('i8', count)
      local numbers = {unpack_ints(format, bytes, place)}
      for i = 2, count, 2 do
        if numbers[i - 1] == 0 and numbers[i] == 0 then error({lost = log.key}) end
        numbers[i] = numbers[i] + change
      end
      rows[#rows + 1] = pack(format, unpack(numbers, 1, count))
      left, place = left - count, place + 8 * count
    end
    return concat(rows)
  end

  return {charge = charge_log, view = view_log, adjust = adjust_log, expires = expires_log},
    {charge = charge_log, view = view_log, adjust = adjust_slots, expires = expires_log}
end

-- ---- dispatch -----------------------------------------------------------------------------------------------------

local fixed, calendar = build_windows()
local log, slots = build_log()
local ALGORITHMS = {build_bucket(), fixed, calendar, build_sliding(), log, slots}

local asks, costs, states = {}, {}, {}  -- reused for each group
local lost  -- keys of logs that are lost while their entry exists: such a state counts as none

local function build_decide()
  -- ---- verbs: apply to the states of all limits of a key at once (core/decision.py) -------------------------------

  local function acquire(limits, states, costs, now)
    local changed = {}
    for i = 1, #limits do
      local limit, cost = limits[i], costs[i]
      if cost == 0 then
        changed[i] = states[i]
      else
        local charged = limit.rules.charge(states[i], limit, cost, now)
        if not charged then return false, states, costs end
        changed[i] = charged
      end
    end
    return true, changed, EMPTY
  end

  local function peek(limits, states, costs, now)
    return acquire(limits, states, costs, now)
  end

  local function hold(limits, states, costs, now)
    local allowed, changed, left = acquire(limits, states, costs, now)
    if allowed then
      for i, limit in ipairs(limits) do
        if limit.rules.mark and costs[i] > 0 and changed[i] then changed[i] = limit.rules.mark(changed[i]) end
      end
    end
    return allowed, changed, left
  end

  local function adjust(limits, states, costs, now, at)
    local changed = {}
    for i, limit in ipairs(limits) do
      changed[i] = states[i]
      if costs[i] ~= 0 then changed[i] = limit.rules.adjust(states[i], limit, costs[i], now, at) end
    end
    return true, changed, EMPTY
  end

  local function reset(limits)
    local changed = {}
    for i = 1, #limits do changed[i] = false end
    return true, changed, EMPTY
  end

  local VERBS = {acquire, peek, hold, adjust, reset}

  -- ---- states as numbers (core/codec.py), and entries as the records of a key's states ----------------------------
  --
  -- A record is `limit.prefix` (count, id, owner), then expires and the numbers of the state. Those that belong to the
  -- limit come last, as `limit.suffix`; only the marks of a bucket follow them. The end of a window is `expires`, unless
  -- older windows follow its numbers. Stored numbers are doubles.

  -- Read the state whose record, `size` bytes, begins at `from`.
  local function load_state(algorithm, owner, value, from, size)
    if algorithm == 1 then
      local expires, level, at = unpack_ints('<ddd', value, from + 24)
      local marks = EMPTY
      if size > 72 then
        marks = {unpack_ints('<' .. rep('d', size / 8 - 9), value, from + 72)}
        marks[#marks] = nil  -- the position after the read
      end
      return {level = level, at = at, marks = marks, owner = owner, expires = expires, value = value, from = from}
    elseif algorithm <= 3 then
      local expires, used, start = unpack_ints('<ddd', value, from + 24)
      local ends, ended, older, seen = expires, 0, EMPTY, nil
      if size > 48 then
        ends, seen, ended = unpack_ints('<ddd', value, from + 48)
        older = {unpack_ints('<' .. rep('d', size / 8 - 9), value, from + 72)}
        older[#older] = nil  -- the position after the read
      end
      return {used = used, start = start, ends = ends, seen = seen, ended = ended, older = older,
              owner = owner, expires = expires, value = value, from = from}
    elseif algorithm == 4 then
      local expires, count, previous, start, length = unpack_ints('<ddddd', value, from + 24)
      return {count = count, previous = previous, start = start, length = length,
              owner = owner, expires = expires, value = value, from = from}
    end
    local expires, head, tail, base, first, last, total = unpack_ints('<ddddddd', value, from + 24)
    return {head = head, tail = tail, base = base, first = first, last = last, total = total, writes = EMPTY,
            owner = owner, expires = expires, value = value, from = from}
  end

  local function dump_state(state, limit, expires)
    local algorithm = limit.algorithm
    if algorithm == 1 then
      local marks = state.marks
      if #marks == 0 then return limit.prefix .. pack('<ddd', expires, state.level, state.at) .. limit.suffix end
      return pack('<dddddd', FORMAT + 5 + #marks, limit.id, limit.owner, expires, state.level, state.at) .. limit.suffix
        .. pack('<' .. rep('d', #marks), unpack(marks))
    elseif algorithm <= 3 then
      if not state.seen then return limit.prefix .. pack('<ddd', expires, state.used, state.start) end
      local older = state.older
      return pack('<dddddd', FORMAT + 5 + #older, limit.id, limit.owner, expires, state.used, state.start)
        .. pack('<ddd' .. rep('d', #older), state.ends, state.seen, state.ended, unpack(older))
    elseif algorithm == 4 then
      return limit.prefix .. pack('<ddddd', expires, state.count, state.previous, state.start, state.length)
    end
    return limit.prefix
      .. pack('<ddddddd', expires, state.head, state.tail, state.base, state.first, state.last, state.total)
  end

  local function size_of(value, from)
    return 32 + 8 * (unpack_ints('<d', value, from) - FORMAT)
  end

  local function read_entry(ask, place, states)
    local policy, value = ask.policy, call('GET', ask.key)
    local limits = policy.limits
    ask.had, ask.others = value, EMPTY
    local from, size = 1, value and #value or 0
    for i = 1, #limits do
      local limit = limits[i]
      states[place + i] = false
      if from < size and sub(value, from, from + 23) == limit.prefix and not policy.logs then
        -- Written by exactly these limits: the common case.
        states[place + i] = load_state(limit.algorithm, limit.owner, value, from, limit.size)
        from = from + limit.size
      end
    end
    while from < size do
      local count, id, owner = unpack_ints('<ddd', value, from)
      if count >= 2 * FORMAT then error('the state was written by a newer tidegate', 0) end
      if count < FORMAT then error('the state was written by an older tidegate', 0) end
      local i = policy.places[id]
      if not i then
        if ask.others == EMPTY then ask.others = {} end
        table.insert(ask.others, from)
      elseif not (ask.logs[i] and lost[ask.logs[i]]) then
        local state = load_state(limits[i].algorithm, owner, value, from, size_of(value, from))
        state.key = ask.logs[i]
        states[place + i] = state
      end
      from = from + size_of(value, from)
    end
  end

  local function write_log(key, state, keep)
    for _, write in ipairs(state.writes) do
      if write[1] == 0 then
        call('SET', key, write[2])
      else
        call('SETRANGE', key, write[1] * 16, write[2])
      end
    end
    if state.cut then call('SET', key, call('GETRANGE', key, state.cut * 16, -1)) end
    call('PEXPIRE', key, keep)
  end

  -- Store the new states, together with live states of limits that are not (or no longer) in the policy.
  local function write_entry(ask, place, states, before, now, slack)
    local records, count, last, limits = {}, 0, now, ask.policy.limits
    for i = 1, #limits do
      local limit, state = limits[i], states[place + i]
      if state then
        local expires = state.expires
        count = count + 1
        if expires then
          records[count] = sub(state.value, state.from, state.from + size_of(state.value, state.from) - 1)
        else
          expires = limit.rules.expires(state, limit)
          records[count] = dump_state(state, limit, expires)
          if ask.logs[i] then write_log(ask.logs[i], state, ceil_div(max(0, expires - now), 1000) + slack) end
        end
        if expires > last then last = expires end
      elseif ask.logs[i] and before[place + i] then
        call('DEL', ask.logs[i])
      end
    end
    for _, from in ipairs(ask.others) do
      local expires = unpack_ints('<d', ask.had, from + 24)
      if expires > now then
        count = count + 1
        records[count] = sub(ask.had, from, from + size_of(ask.had, from) - 1)
        last = max(last, expires)
      end
    end
    if count > 0 then
      call('SET', ask.key, count == 1 and records[1] or concat(records), 'PX', ceil_div(last - now, 1000) + slack)
    elseif ask.had then
      call('DEL', ask.key)
    end
  end

  local function decide(verb, number, now, slack, at)
    local limits = asks[1].policy.limits
    read_entry(asks[1], 0, states)
    if number > 1 then
      limits = {unpack(limits)}
      for i = 2, number do
        local place = #limits
        read_entry(asks[i], place, states)
        for j, limit in ipairs(asks[i].policy.limits) do limits[place + j] = limit end
      end
    end
    local allowed, changed, left = VERBS[verb](limits, states, costs, now, at)
    local count = answered
    answer[count + 1], answer[count + 2] = allowed and 1 or 0, now
    count = count + 2
    for i = 1, #limits do
      local limit = limits[i]
      answer[count + 1], answer[count + 2], answer[count + 3] = limit.rules.view(changed[i], limit, left[i] or 0, now)
      count = count + 3
    end
    if changed ~= states and verb ~= 2 then
      local place = 0
      for i = 1, number do
        if verb == 5 then asks[i].others = EMPTY end  -- everything
        write_entry(asks[i], place, changed, states, now, slack)
        place = place + #asks[i].policy.limits
      end
    end
    answered = count
  end

  local function attempt(fails, ...)
    if not fails then return decide(...) end
    local done, trouble = pcall(decide, ...)
    while not done and type(trouble) == 'table' and trouble.lost do
      lost[trouble.lost] = true
      done, trouble = pcall(decide, ...)
    end
    if done then return end
    if type(trouble) ~= 'table' or not trouble.need then error(trouble, 0) end
    answer[answered + 1], answer[answered + 2] = 2, trouble.need
    answered = answered + 2
  end

  return attempt
end

-- ---- the call -----------------------------------------------------------------------------------------------------

-- Numbers of a limit: count, id, owner, scale, rate, capacity, algorithm, quota, length, burst, floor, tick, windows.
-- `fails` is set if a decision by this policy may find that a calendar window or a log is missing.
local function read_policy(bytes)
  local numbers, size = read_doubles(bytes)
  local policy, from = {limits = {}, places = {}, logs = false, fails = false, buckets = true}, 1
  while from < size do
    local algorithm, windows = numbers[from + 6], EMPTY
    if numbers[from + 12] > 0 then windows = {unpack(numbers, from + 13, from + 12 + numbers[from + 12])} end
    policy.limits[#policy.limits + 1] = {
      prefix = sub(bytes, from * 8 - 7, from * 8 + 16), suffix = sub(bytes, from * 8 + 17, from * 8 + 40),
      size = 32 + 8 * (numbers[from] - FORMAT), id = numbers[from + 1], owner = numbers[from + 2], scale = numbers[from + 3],
      rate = numbers[from + 4], capacity = numbers[from + 5], algorithm = algorithm, quota = numbers[from + 7],
      length = numbers[from + 8], burst = numbers[from + 9], floor = numbers[from + 10], tick = numbers[from + 11],
      windows = windows, rules = ALGORITHMS[algorithm],
    }
    policy.places[numbers[from + 1]] = #policy.limits
    policy.logs = policy.logs or algorithm >= 5
    policy.fails = policy.fails or algorithm == 3 or algorithm >= 5
    policy.buckets = policy.buckets and algorithm == 1
    from = from + 13 + numbers[from + 12]
  end
  return policy
end

-- ---- values (stores/memory/values.py) -----------------------------------------------------------------------------
--
-- An operation is kind, key (counted from the end of `keys`), ttl and the lengths of name, expected and data, as doubles;
-- then these strings. A value is stored as the times of its write and of its end, as doubles, then its data: as a string, or,
-- if it has a name, in a hash. The ends of the values of a hash are in a sorted set, whose key is the one before.

local function build_values()
  local PUT, DELETE, GET, CONDITION, ABSENT = 1, 2, 3, 5, -1
  local MAX_LISTED = 10000
  local SCANNED, PAGE_BYTES, STEP_BYTES = 16, 262144, 1024  -- a page ends after so many bytes; a step of the scan counts

  local function read_operations(bytes)
    local operations, from = {}, 1
    while from < #bytes do
      local kind, key, ttl, name, expected, data = unpack_ints('<dddddd', bytes, from)
      local operation = {kind = kind, key = keys[#keys + 1 - key], ends = keys[#keys - key], ttl = ttl}
      from = from + 48
      operation.name = sub(bytes, from, from + name - 1)
      from = from + name
      if expected == ABSENT then operation.expected = false end
      if expected >= 0 then
        operation.expected = sub(bytes, from, from + expected - 1)
        from = from + expected
      end
      operation.data = sub(bytes, from, from + data - 1)
      from = from + data
      operations[#operations + 1] = operation
    end
    return operations
  end

  local function ends_of(value)
    local _, ends = unpack_ints('<dd', value)
    return ends
  end

  local function read_value(operation, now)
    local value
    if operation.name == '' then
      value = call('GET', operation.key)
    else
      value = call('HGET', operation.key, operation.name)
    end
    return value and ends_of(value) > now and value
  end

  -- One of the two keys of a collection was evicted.
  local function restore_ends(operation)
    local cursor = '0'
    call('DEL', operation.ends)
    repeat
      local page = call('HSCAN', operation.key, cursor, 'COUNT', CHUNK)
      local found = page[2]
      cursor = page[1]
      for i = 1, #found, 2 do call('ZADD', operation.ends, ends_of(found[i + 1]), found[i]) end
    until cursor == '0'
    local left = call('PTTL', operation.key)
    if left > 0 then call('PEXPIRE', operation.ends, left) end
  end

  -- Remove the ended values of a collection; return how many it has.
  local function remove_ended(operation, now)
    if call('HLEN', operation.key) ~= call('ZCARD', operation.ends) then restore_ends(operation) end
    repeat
      local ended = call('ZRANGEBYSCORE', operation.ends, '-inf', now, 'LIMIT', 0, CHUNK)
      if #ended > 0 then
        call('HDEL', operation.key, unpack(ended))
        call('ZREM', operation.ends, unpack(ended))
      end
    until #ended < CHUNK
    return call('ZCARD', operation.ends)
  end

  -- Return whether all conditions hold and all values have room; if not, this is the answer.
  local function check(operations, now)
    local sizes = {}
    for i, operation in ipairs(operations) do
      local key, listed = operation.key, operation.name ~= '' and operation.kind <= DELETE
      if listed and not sizes[key] then sizes[key] = remove_ended(operation, now) end
      if operation.expected ~= nil then
        local value = read_value(operation, now)
        if (value and sub(value, 17)) ~= operation.expected then
          answer[answered + 1], answer[answered + 2] = 3, i
          answered = answered + 2
          write_bytes(value or '')
          return false
        end
      end
      if listed and operation.kind == PUT and not call('ZSCORE', operation.ends, operation.name) then
        sizes[key] = sizes[key] + 1
        if sizes[key] > MAX_LISTED then
          answer[answered + 1], answer[answered + 2] = 4, i
          answered = answered + 2
          return false
        end
      end
    end
    return true
  end

  local function put(operation, now, slack)
    local ends, keep = now + operation.ttl, ceil_div(operation.ttl, 1000) + slack
    local value = pack('<dd', now, ends) .. operation.data
    if operation.name == '' then
      call('SET', operation.key, value, 'PX', keep)
      return
    end
    call('HSET', operation.key, operation.name, value)
    call('ZADD', operation.ends, ends, operation.name)
    if keep > call('PTTL', operation.key) then
      call('PEXPIRE', operation.key, keep)
      call('PEXPIRE', operation.ends, keep)
    end
  end

  local function delete(operation)
    if operation.name == '' then
      call('DEL', operation.key)
    else
      call('HDEL', operation.key, operation.name)
      call('ZREM', operation.ends, operation.name)
    end
  end

  -- Answer with one page of a collection: where the next one begins, the number of values, and the values.
  local function list(operation, now)
    local cursor, found, bytes = operation.name, {}, 0
    repeat
      local page = call('HSCAN', operation.key, cursor, 'COUNT', SCANNED)
      local fields = page[2]
      cursor = page[1]
      for i = 1, #fields, 2 do
        if ends_of(fields[i + 1]) > now then
          found[#found + 1], found[#found + 2] = fields[i], fields[i + 1]
          bytes = bytes + #fields[i] + #fields[i + 1]
        end
      end
      bytes = bytes + STEP_BYTES
    until cursor == '0' or bytes >= PAGE_BYTES
    write_bytes(cursor)
    answered = answered + 1
    answer[answered] = #found / 2
    for i = 1, #found, 2 do
      write_bytes(found[i])
      write_bytes(found[i + 1])
    end
  end

  local function perform(operations, now, slack)
    for _, operation in ipairs(operations) do
      if operation.kind == PUT then
        put(operation, now, slack)
      elseif operation.kind == DELETE then
        delete(operation)
      elseif operation.kind == GET then
        write_bytes(read_value(operation, now) or '')
      elseif operation.kind ~= CONDITION then
        list(operation, now)
      end
    end
  end

  return read_operations, check, perform
end

local attempt = build_decide()
local read_operations, check, perform = build_values()

local MAX_KNOWN_LIMITS = 2000  -- a few megabytes
local known, known_limits = {}, 0  -- policies of earlier calls, by what was sent; a script starts without them

local function policy_of(bytes)
  local policy = known[bytes]
  if not policy then
    policy = read_policy(bytes)
    known_limits = known_limits + #policy.limits
    if known_limits > MAX_KNOWN_LIMITS then known, known_limits = {}, #policy.limits end
    known[bytes] = policy
  end
  return policy
end

local function start(call_keys, call_args)
  keys, args, clock, answer, answered, reply, lost = call_keys, call_args, nil, {}, 0, nil, {}
end

-- All groups of a call are decided at the same instant.
local function server_time()
  if not clock then
    local time = call('TIME')
    clock = time[1] * 1000000 + time[2]
  end
  return clock
end

-- Acquire at a key whose limits are all buckets, whose states were written by these limits, or by none. This does what
-- `decide` does, without tables, for the default algorithm: 17 to 27 % of the time of concurrent calls, 10 to 15 % of a
-- single one. It returns false, and has done nothing, if a state is another one or a cost is 0. The costs follow `place`.
local levels, ats = {}, {}

local function acquire_buckets(policy, key, asked, place, now, slack)
  local limits, value = policy.limits, call('GET', key)
  local count = #limits
  if value and #value ~= 72 * count then return false end
  local allowed, from = true, 1
  for i = 1, count do
    local limit, cost = limits[i], asked[place + i]
    local level, at = limit.capacity, now
    if cost == 0 then return false end
    if value then
      if sub(value, from, from + 23) ~= limit.prefix then return false end
      level, at = unpack_ints('<dd', value, from + 32)
      from = from + 72
      if now > at then
        local lacking = (limit.capacity - level) / limit.rate
        if now - at > lacking - lacking % 1 then level = limit.capacity else level = level + (now - at) * limit.rate end
        at = now
      end
    end
    if cost * limit.scale > level then allowed = false end  -- also beyond 2^53, where the product is only approximate
    levels[i], ats[i] = level, at
  end
  local ends, record = now, ''
  answer[answered + 1], answer[answered + 2] = allowed and 1 or 0, now
  answered = answered + 2
  for i = 1, count do
    local limit, cost, level, at = limits[i], asked[place + i], levels[i], ats[i]
    local capacity, rate, scale, retry = limit.capacity, limit.rate, limit.scale, 0
    if allowed then
      level = level - cost * scale
    elseif cost > limit.burst then
      retry = -1
    elseif cost * scale > level then
      retry = (level - cost * scale) / rate
      retry = at - now + retry % 1 - retry
    end
    local missing, permits = (level - capacity) / rate, level / scale
    local expires = at + missing % 1 - missing
    if allowed then record = record .. limit.prefix .. pack('<ddd', expires, level, at) .. limit.suffix end
    if expires > ends then ends = expires end
    answer[answered + 1], answer[answered + 2] = permits - permits % 1, retry
    answer[answered + 3] = level < capacity and expires - now or 0
    answered = answered + 3
  end
  if allowed then
    local keep = (now - ends) / 1000
    call('SET', key, record, 'PX', keep % 1 - keep + slack)
  end
  return true
end

-- Read the ask whose policy is the number at `place` and whose first key is keys[key]; return its policy and its last key.
local function read_ask(number, count, asked, place, key)
  local policy, ask = policy_of(args[asked[place] + 1]), asks[number] or {}
  asks[number], ask.policy, ask.key, ask.logs = ask, policy, keys[key], EMPTY
  for i = 1, #policy.limits do costs[count + i] = asked[place + i] end
  if policy.logs then
    ask.logs = {}
    for i, limit in ipairs(policy.limits) do
      if limit.algorithm >= 5 then
        key = key + 1
        ask.logs[i] = keys[key]
      end
    end
  end
  return policy, key
end

-- Why a group cannot be decided, if only this one is concerned: a key of another type, or a state that cannot be read.
-- Other errors of the server concern all calls, and are raised.
local function reason_of(trouble)
  if type(trouble) ~= 'table' then return tostring(trouble) end
  local reason = trouble.err or ''
  if string.find(reason, '^%-?WRONGTYPE') then return reason end
  error(trouble, 0)
end

local function decide_one(policy, verb, asked, place, now, slack, at)
  if verb ~= 1 or not policy.buckets or not acquire_buckets(policy, keys[1], asked, place, now, slack) then
    read_ask(1, 0, asked, place, 1)
    attempt(policy.fails, verb, 1, now, slack, at)
  end
end

-- Decide one group of one ask, without operations on values.
local function one(call_keys, call_args)
  start(call_keys, call_args)
  local asked = read_doubles(args[1])
  local verb, place, now, slack, at = asked[1], 4, nil, SLACK, nil
  if verb > TIMED then
    verb, now, slack, at, place = verb - TIMED, asked[4], asked[5], asked[6], 7
    if now == NONE then now = nil end
    if at == NONE then at = nil end
  end
  now = now or server_time()
  local done, trouble = pcall(decide_one, policy_of(args[2]), verb, asked, place, now, slack, at)
  if not done then refuse(0, 0, reason_of(trouble)) end
  if reply then return concat(reply) end
  return write_ints(answer, answered)
end

-- Decide one group, whose asks were read; return its status. The operations on values are checked before the first
-- alternative, and performed after the one that is allowed.
local function decide_group(verb, number, fails, first, operations, now, slack, at)
  if first and operations and not check(operations, now) then return 3 end
  local status, before = 1, answered
  if number == 0 then
    answer[before + 1], answer[before + 2] = 1, now
    answered = before + 2
  else
    attempt(fails, verb, number, now, slack, at)
    status = answer[before + 1]
  end
  if operations and status == 1 then perform(operations, now, slack) end
  return status
end

-- Decide groups. A verb above ALTERNATIVE is decided only if what was decided just before it was denied; otherwise it has no
-- answer. The operations on values are those of the first alternative.
local function batch(call_keys, call_args)
  start(call_keys, call_args)
  local asked, size = read_doubles(args[1])
  local place, key, status, operations = 1, 0, 0, nil
  while place < size do
    local verb, number, argument = asked[place], asked[place + 1], asked[place + 2]
    local now, slack, at = NONE, SLACK, NONE
    place = place + 3
    if verb > TIMED then
      verb, now, slack, at, place = verb - TIMED, asked[place], asked[place + 1], asked[place + 2], place + 3
    end
    local first, skipped = verb < ALTERNATIVE, verb > ALTERNATIVE and status ~= 0
    if verb > ALTERNATIVE then verb = verb - ALTERNATIVE end
    if now == NONE then now = server_time() end
    if at == NONE then at = nil end
    if first then operations = nil end
    if argument > 0 then operations = read_operations(args[argument + 1]) end
    if operations then flush() end
    local parts, before, done, result = reply and #reply or 0, answered, true, false
    local policy = number == 1 and verb == 1 and first and not operations and policy_of(args[asked[place] + 1])
    if policy and policy.buckets then
      done, result = pcall(acquire_buckets, policy, keys[key + 1], asked, place, now, slack)
    end
    if done and result then
      status = answer[answered - 3 * #policy.limits - 1]
      key, place = key + 1, place + 1 + #policy.limits
    else
      local count, fails = 0, false
      for i = 1, number do
        policy, key = read_ask(i, count, asked, place, key + 1)
        count, place = count + #policy.limits, place + 1 + #policy.limits
        fails = fails or policy.fails
      end
      if done and not skipped then
        done, result = pcall(decide_group, verb, number, fails, first, operations, now, slack, at)
        if done then status = result end
      end
      if not done then
        refuse(parts, before, reason_of(result))
        status = 5
      end
    end
  end
  if not reply then return write_ints(answer, answered) end
  return concat(reply) .. write_ints(answer, answered)
end
