-- Envoy runs this script for each request. The script hashes the start of a conversation, so that all turns of the
-- conversation reach the replica that has their prefix in its cache. A client may name the conversation with the header
-- x-session-id instead.

-- The number of bytes after the start of a prompt that are the key of a request without messages.
local PROMPT_BYTES = 1024
-- The most bytes of a request that are read.
local LONGEST = 65536

local QUOTE, BACKSLASH, OPEN, CLOSE = 34, 92, 123, 125

local function end_of_string(body, at)
  while true do
    at = body:find('["\\]', at + 1)
    if not at then
      return #body
    elseif body:byte(at) == QUOTE then
      return at
    end
    at = at + 1
  end
end

-- Returns where the first message of a user ends; the end of the list of messages if there is none.
local function end_of_first_question(body, at)
  local depth, message = 0, at
  at = body:find("[", at, true) or #body
  while true do
    at = body:find('["{}%]]', at + 1)
    local char = at and body:byte(at)
    if not at then
      return #body
    elseif char == QUOTE then
      at = end_of_string(body, at)
    elseif char == OPEN then
      message = depth == 0 and at or message
      depth = depth + 1
    elseif char == CLOSE then
      depth = depth - 1
      if depth == 0 and body:sub(message, at):find('"role"%s*:%s*"user"') then
        return at
      end
    elseif depth == 0 then
      return at
    end
  end
end

-- Returns the key of a request. For a chat this is the text of its messages up to and including the first user message.
local function key_of(body)
  local messages = body:find('"messages"%s*:%s*%[') or body:find('"input"%s*:%s*%[%s*{')
  if messages then
    return body:sub(messages, end_of_first_question(body, messages))
  end
  local prompt = body:find('"prompt"%s*:') or body:find('"input"%s*:') or body:find('"input_ids"%s*:')
  return prompt and body:sub(prompt, prompt + PROMPT_BYTES)
end

-- Whether a request is for vectors or scores. Its server keeps nothing of earlier requests, so any replica will do.
local function needs_no_prefix(path)
  path = path:gsub("?.*", "")
  return path:find("/embeddings$") or path:find("/rerank$") or path:find("/score$")
end

-- Returns the 32-bit FNV-1a hash. The product is computed in two halves, because a double holds only 53 bits.
local function hash(text)
  local value = 2166136261
  for i = 1, #text do
    value = bit.bxor(value, text:byte(i))
    local low, high = bit.band(value, 0xffff), bit.rshift(value, 16)
    value = bit.tobit(low * 16777619 + bit.lshift(bit.band(high * 16777619, 0xffff), 16))
  end
  return bit.tohex(value)
end

function envoy_on_request(handle)
  local key = handle:headers():get("x-session-id")
  local post = handle:headers():get(":method") == "POST"
  if not key and post and not needs_no_prefix(handle:headers():get(":path")) then
    local body = handle:body()
    if body and body:length() > 0 then
      key = key_of(body:getBytes(0, math.min(body:length(), LONGEST)))
    end
  end
  -- body() invalidates the headers object, so headers() is called again.
  handle:headers():remove("x-dlinfer-prefix")
  if key then
    handle:headers():add("x-dlinfer-prefix", hash(key))
  end
end
